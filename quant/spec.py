"""What a layer's recurrent state looks like: family, heads, sizes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidValueError, unknown_name


@dataclass(frozen=True)
class Family:
    """What tells one layer family from another; everything else is shared (docs/window-algebra.md)."""

    name: str
    title: str
    delta_rule: bool
    """e in docs/window-algebra.md: the write first erases what the state holds at k (GDN, KDA)."""
    decay: str
    """``head``: one log-decay per head; ``channel``: one per key column (KDA)."""
    gain_sets_decay: bool
    """Mamba-2: g = A·Δ with a constant A per head, so the ring keeps Δ alone."""


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("mamba2", "Mamba-2", delta_rule=False, decay="head", gain_sets_decay=True),
        Family("gdn", "Gated DeltaNet", delta_rule=True, decay="head", gain_sets_decay=False),
        Family("kda", "Kimi Delta Attention", delta_rule=True, decay="channel", gain_sets_decay=False),
    )
}


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one layer's state: per head V × K, K contiguous.

    Mamba-2: V = headdim, K = dstate, ``key_heads`` = groups. GDN, KDA: V and K are the value and key
    dimensions, ``key_heads`` = key heads. Consecutive ``heads // key_heads`` heads share one key head.
    ``qk_l2norm`` and ``query_scale`` say how raw queries and keys become those of the recurrence:
    k ← k·rsqrt(Σk² + 1e-6), q ← query_scale · (the same of q).
    """

    family: str
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    qk_l2norm: bool = False
    query_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise unknown_name("layer family", self.family, FAMILIES)
        if min(self.heads, self.key_heads, self.value_dim, self.key_dim) < 1 or self.heads % self.key_heads:
            raise InvalidValueError(
                f"{self} has sizes that do not fit: all must be positive and heads a multiple of key_heads"
            )

    @property
    def rules(self) -> Family:
        return FAMILIES[self.family]

    @property
    def elements(self) -> int:
        """State elements of one sequence in this layer: heads · V · K."""
        return self.heads * self.value_dim * self.key_dim
