"""The result of an evaluation: a typed, versioned JSON document. Loads without torch.

KL is in nats per token, positions are tokens since the start of a sequence (``start`` included, ``stop`` not),
errors are relative (‖arm − exact‖ / ‖exact‖), bytes are per state element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ..quant.errors import FileFormatError, unknown_name
from .formatting import printable
from .records import dump, from_plain, load, to_plain, write_atomic

SCHEMA: Final = "quantize-state/result/1"
ARM_SCHEMA: Final = "quantize-state/arm/1"


@dataclass(frozen=True)
class Model:
    """``layers`` counts layers by family, as {"gdn": 6, "attention": 2}; ``sha256`` is over the weights."""

    name: str
    parameters: int
    layers: dict[str, int]
    sha256: str
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """``tokens`` is per sequence; ``generated`` of them came from the reference arm itself (0: all are text)."""

    source: str
    tokens: int
    sequences: int
    sha256: str
    protocol: str
    generated: int = 0
    prompt: int = 0


@dataclass(frozen=True)
class Policy:
    """The fields of a StatePolicy. A recipe arm has ``recipe`` and its layers' own policies in ``layers``."""

    checkpoint: str
    read: str | None
    window: int
    scale_rule: str = "amax"
    rotation: str | None = None
    stochastic: bool = False
    seed: int = 0
    recipe: str | None = None
    balanced: bool = False


@dataclass(frozen=True)
class Bucket:
    start: int
    stop: int
    mean: float
    ci95: tuple[float, float] | None
    count: int


@dataclass(frozen=True)
class Bootstrap:
    """How the intervals were made: ``block`` tokens per block, about ``blocks`` blocks in the text."""

    method: str
    block: int
    blocks: int
    resamples: int
    seed: int


@dataclass(frozen=True)
class KL:
    """KL(reference ‖ arm) per token; ``reverse_mean`` is the mean of KL(arm ‖ reference).

    ``by_document`` is the mean of each sequence, in the text's order, and ``by_span`` that of each sequence's
    consecutive spans of ``span`` tokens (the last may be shorter), by which two results on one text are paired. Both
    are empty in results older than these fields.
    """

    mean: float
    ci95: tuple[float, float] | None
    p999: float
    max: float
    reverse_mean: float
    by_position: list[Bucket]
    tokens: int
    bootstrap: Bootstrap
    by_document: list[float] = field(default_factory=list)
    span: int = 0
    by_span: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class TopOne:
    """``rate`` over the ``tokens`` where neither side's top logit is tied; ``ties`` counts the others."""

    rate: float | None
    ties: int
    tokens: int


@dataclass(frozen=True)
class Perplexity:
    """Of the text under both; bits per byte only where a token's share of the text in bytes is known."""

    arm: float
    reference: float
    ratio: float
    ratio_ci95: tuple[float, float] | None
    bits_per_token: float
    reference_bits_per_token: float
    bits_per_byte: float | None = None
    reference_bits_per_byte: float | None = None


@dataclass(frozen=True)
class BytesPerElement:
    resident: float
    moved_per_step: float


@dataclass(frozen=True)
class ErrorBucket:
    """``error`` is None where it is no number: overflow, or an exact value of zero."""

    start: int
    stop: int
    error: float | None

    @property
    def middle(self) -> float:
        """Where the bucket stands on a logarithmic axis."""
        return math.sqrt(self.start * self.stop)


@dataclass(frozen=True)
class ErrorPoint:
    position: int
    error: float | None


@dataclass(frozen=True)
class Exponent:
    """Least-squares slope of log error on log position: 0 is flat, 0.5 a random walk, 1 linear growth."""

    value: float
    stderr: float
    points: int


@dataclass(frozen=True)
class Exponents:
    state: Exponent | None
    output: Exponent | None


@dataclass(frozen=True)
class Layer:
    """``output_error`` is over all tokens, ``state_error`` that at the last sampled position."""

    name: str
    family: str
    policy: str
    output_error: float | None
    state_error: float | None
    output_error_by_position: list[ErrorBucket]
    state_error_by_position: list[ErrorPoint]
    exponents: Exponents


@dataclass(frozen=True)
class Overflow:
    """A batch of documents that an arm could not finish, as its state, or its logits, came to hold Inf or NaN.

    ``documents`` are those of the batch, which stops as a whole: any of them may be the one. ``tokens`` of each were
    measured, and nothing from there on. ``layer`` is where it was seen, None for logits; ``reason`` is the error.
    """

    documents: list[int]
    tokens: int
    layer: str | None
    reason: str


@dataclass(frozen=True)
class Arm:
    """``policy`` is None for an arm without one: the untouched model.

    ``weights`` is the format of an arm's quantised weights; ``kl_to_weights`` is the KL to the same weights with exact
    states, which is what the states add: KL(weights only ‖ arm).

    An arm with ``overflows`` has the numbers of the tokens before (``kl.tokens`` says how many, 0 at worst), so that
    its mean KL is no more than a lower bound.
    """

    name: str
    policy: Policy | None
    kl: KL
    top1_agreement: TopOne
    ppl: Perplexity | None
    bytes_per_element: BytesPerElement
    layers: list[Layer]
    seconds: float
    weights: str | None = None
    kl_to_weights: KL | None = None
    overflows: list[Overflow] = field(default_factory=list)


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from. ``sha256`` hashes what went in (weights, text), ``versions`` names packages.

    ``processes`` shared the documents; ``device`` is that of the first. ``columns`` says what the column scales of
    balanced arms were measured on, None where no arm has any.
    """

    quantize_state: str
    git_commit: str | None
    git_dirty: bool | None
    versions: dict[str, str]
    device: str
    threads: int
    dtype: str
    engine: str
    window: int
    seeds: dict[str, int]
    sha256: dict[str, str]
    command: str
    started: str
    finished: str
    processes: int = 1
    columns: str | None = None


@dataclass(frozen=True)
class Result:
    """One model, one text, several arms beside one reference.

    ``layer_errors`` says what a layer's error is measured against: ``same-inputs``, the exact recurrence on the
    inputs that the arm's layer itself received, or ``in-model``, the reference arm's layer, whose inputs differ
    by what earlier layers changed.
    """

    model: Model
    text: Text
    arms: list[Arm]
    provenance: Provenance
    status: Literal["complete", "partial"] = "complete"
    layer_errors: Literal["same-inputs", "in-model"] = "in-model"
    kind: Literal["kl"] = "kl"
    schema: Literal["quantize-state/result/1"] = SCHEMA

    def arm(self, name: str) -> Arm:
        """The arm called ``name``; raises InvalidValueError with close matches where there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise unknown_name("arm", name, [arm.name for arm in self.arms])

    @property
    def tokens(self) -> int:
        """Tokens evaluated in all, over the sequences."""
        return self.text.tokens * self.text.sequences

    def to_json(self) -> str:
        return dump(self)

    def printable(self) -> Result:
        """The same result to be shown: control characters in its names and texts spelled out (\\x1b)."""
        return from_plain(Result, _printable(to_plain(self)))

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write atomically; an existing file is replaced only with ``overwrite``."""
        write_atomic(Path(path), self.to_json(), overwrite=overwrite)

    @classmethod
    def read(cls, path: str | Path) -> Result:
        """Read and check a result.json. Raises FileFormatError naming file, what was found and what to do."""
        path = Path(path)
        if path.is_dir():
            path = path / "result.json"
        result = load(cls, path, SCHEMA)
        names = [arm.name for arm in result.arms]
        if len(set(names)) != len(names):
            raise FileFormatError(f"{path} has two arms of one name; evaluate again")
        return result


@dataclass(frozen=True)
class StoredArm:
    """One arm on its own, as a run stores it while others are still to come."""

    arm: Arm
    fingerprint: str
    schema: Literal["quantize-state/arm/1"] = ARM_SCHEMA

    def write(self, path: Path) -> None:
        write_atomic(path, dump(self), overwrite=True)

    @classmethod
    def read(cls, path: Path) -> StoredArm:
        return load(cls, path, ARM_SCHEMA)


def _printable(plain: Any) -> Any:
    if isinstance(plain, str):
        return printable(plain)
    if isinstance(plain, dict):
        return {printable(key): _printable(value) for key, value in plain.items()}
    return [_printable(item) for item in plain] if isinstance(plain, list) else plain
