"""Mamba-2: vLLM's MambaMixer2 (NemotronH, Mamba2, GraniteMoeHybrid, FalconH1, Zamba2) with a read copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops import ssu_dispatch

from .calculators import mamba2_spec
from .gates import mamba2_inputs
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
            x = x.contiguous()
            inputs = mamba2_inputs(x, dt[..., 0], B, C, dt_bias[:, 0])  # expanded along V, all but x
            running.layer.decode(inputs, kwargs["state_batch_indices"][:, 0], kwargs["out"], skip=(x, D[:, 0]))

    return ReadCopyBackend


LAYER = ReadCopyMambaMixer2
