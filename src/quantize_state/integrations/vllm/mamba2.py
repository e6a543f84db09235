"""Mamba-2: vLLM's MambaMixer2 (NemotronH, Mamba2, Bamba, GraniteMoeHybrid, FalconH1, Zamba2) with a read copy."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops import ssu_dispatch

from ...kernels.inputs import TokenInputs
from .calculators import mamba2_spec
from .layer import ReadCopyLayer, running
from .setup import adopt, bound, spec_for_cpu


class ReadCopyMambaMixer2(ReadCopyLayer, MambaMixer2):
    """Prefill is vLLM's; a decode step goes to the layer's ReadCopy through the registered backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(
            self,
            mamba2_spec(
                tp_world_size=self.tp_size,
                n_groups=self.n_groups,
                num_heads=self.num_heads,
                head_dim=self.head_dim,
                state_size=self.ssm_state_size,
            ),
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        bound(self, self.kv_cache[1], decay_rate=self.A.data)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return spec_for_cpu(super().get_kv_cache_spec(vllm_config))

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        if self.read_copy is None or metadata is None:
            return super().conv_ssm_forward(projected_states, output)
        slots, inside = metadata.state_indices_tensor_p, metadata.checkpoint_meta
        if inside is not None:
            inside = inside.state_indices[inside.checkpoint_offsets > 0]
        has_state = metadata.has_initial_states_p if metadata.prep_initial_states else None
        with self.read_copy.prefill(slots[: metadata.num_prefills], has_state, inside):
            return super().conv_ssm_forward(projected_states, output)


def _decode(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, slots: Tensor, out: Tensor
) -> None:
    """x [B, H, V]; dt [B, H, V], D and dt_bias [H, V], all expanded along V; B, C [B, G, K]; slots [B, 1]."""
    assert running.layer is not None
    delta = F.softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    x = x.contiguous()
    inputs = TokenInputs(q=C[:, None], k=B[:, None], v=x[:, None], beta=delta[:, None])
    running.layer.decode(inputs, slots[:, 0], out, skip=(x, D[:, 0]))


def hook() -> None:
    """Give every backend of the Mamba-2 step a version that hands layers with a read copy to it."""
    for key, backend in list(ssu_dispatch._BACKEND_REGISTRY.items()):
        ssu_dispatch._BACKEND_REGISTRY[key] = _with_read_copies(backend)


def _with_read_copies(backend: Any) -> Any:
    class ReadCopyBackend(backend):
        def __call__(
            self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
            *args: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            if running.layer is None:
                return super().__call__(state, x, dt, A, B, C, D, dt_bias, *args, **kwargs)
            _decode(x, dt, B, C, D, dt_bias, kwargs["state_batch_indices"], kwargs["out"])

    return ReadCopyBackend


LAYERS = {"MambaMixer2": ReadCopyMambaMixer2}
