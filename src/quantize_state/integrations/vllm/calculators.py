"""vLLM computes the size of a page in two places, from the model's config and from its layers. Both ask these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.spec import LayerSpec
from .pages import EXTRA_STATES, checkpoint_dtype, extra_dtypes, extra_shapes
from .plugin import plugin


def extend() -> None:
    """Let the calculators of Mamba-2, GDN and KDA add what a read copy keeps."""
    from vllm.model_executor.layers.mamba import mamba_utils as utils

    for family, name in FAMILIES.items():
        _replace(utils.MambaStateShapeCalculator, f"{name}_state_shape", _shapes, SPECS[family])
        _replace(utils.MambaStateDtypeCalculator, f"{name}_state_dtype", _dtypes)
        _replace(utils.MambaStateCopyFuncCalculator, f"{name}_state_copy_func", _copy_functions)


FAMILIES = {"mamba2": "mamba2", "gdn": "gated_delta_net", "kda": "kda"}
"""What vLLM's calculators call our families."""


def mamba2_spec(
    *, tp_world_size: int, n_groups: int, num_heads: int, head_dim: int, state_size: int, **_: Any
) -> LayerSpec:
    """One rank's share; where the ranks outnumber the groups, each has the one that its heads share."""
    groups = max(n_groups, tp_world_size) // tp_world_size
    return LayerSpec("mamba2", num_heads // tp_world_size, groups, head_dim, state_size)


def gdn_spec(
    tp_world_size: int, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, *_: Any, **__: Any
) -> LayerSpec:
    heads, key_heads = num_v_heads // tp_world_size, num_k_heads // tp_world_size
    return LayerSpec("gdn", heads, key_heads, head_v_dim, head_k_dim, qk_l2norm=True, query_scale=head_k_dim**-0.5)


def kda_spec(tp_world_size: int, num_heads: int, head_dim: int, *_: Any, **__: Any) -> LayerSpec:
    heads = num_heads // tp_world_size
    return LayerSpec("kda", heads, heads, head_dim, head_dim, qk_l2norm=True, query_scale=head_dim**-0.5)


SPECS: dict[str, Callable[..., LayerSpec]] = {"mamba2": mamba2_spec, "gdn": gdn_spec, "kda": kda_spec}


def _replace(calculator: Any, name: str, extended: Callable[..., tuple], *given: Any) -> None:
    original = getattr(calculator, name)

    def calculate(cls: Any, *args: Any, **kwargs: Any) -> tuple:
        stock = original(*args, **kwargs)
        return extended(stock, *given, *args, **kwargs) if plugin.policies else stock

    calculate.__name__ = name
    setattr(calculator, name, classmethod(calculate))


def _shapes(stock: tuple, spec: Callable[..., LayerSpec], *args: Any, **kwargs: Any) -> tuple:
    return (*stock, *extra_shapes(spec(*args, **kwargs), plugin.policies))


def _dtypes(stock: tuple, model_dtype: Any, *_: Any, **__: Any) -> tuple:
    from vllm.utils.torch_utils import get_kv_cache_torch_dtype

    convolution, _recurrent = stock
    checkpoint = checkpoint_dtype(plugin.policies[0])
    return (convolution, checkpoint, *extra_dtypes(get_kv_cache_torch_dtype("auto", model_dtype)))


def _copy_functions(stock: tuple, *_: Any, **__: Any) -> tuple:
    from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec

    return (*stock, *(get_temporal_copy_spec,) * EXTRA_STATES)
