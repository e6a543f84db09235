"""NVIDIA ModelOpt: states as one more quantizer in ``mtq.quantize``, and its block formats on a CPU (docs/modelopt.md).

import modelopt.torch.quantization as mtq
from quantize_state import attach
from quantize_state.integrations import modelopt

modelopt.register()
config = modelopt.on_any_device(mtq.W4A16_NVFP4_CFG)
config["quant_cfg"] += [{"quantizer_name": "*state_read_quantizer", "cfg": modelopt.NVFP4}]
model = mtq.quantize(model, config)
with attach(model, "auto"):
    model.generate(...)
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.models import find_layers
from ..quant.codec import fake_quantize
from ..quant.errors import InvalidValueError, QuantizeStateError, UnsupportedModelError, unknown_name
from ..quant.policy import StatePolicy

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of transformers, and plugins of what is not installed
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer
        from modelopt.torch.quantization.nn.modules.tensor_quantizer import (
            is_registered_quant_backend,
            register_quant_backend,
        )
        from modelopt.torch.quantization.plugins.custom import CUSTOM_MODEL_PLUGINS
except ImportError as error:
    raise QuantizeStateError(
        f"nvidia-modelopt does not load ({error}); `pip install 'quantize-state[modelopt]'` brings it"
    ) from error

BACKEND = "quantize_state"
"""Under this name our codec is a backend of ModelOpt's quantizers: ``"backend": "quantize_state"`` in a ``cfg``."""

NVFP4: dict[str, Any] = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
MXFP4: dict[str, Any] = {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
MXFP8: dict[str, Any] = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
FP8: dict[str, Any] = {"num_bits": (4, 3), "block_sizes": {-1: None, "type": "dynamic"}}
INT8: dict[str, Any] = {"num_bits": 8, "block_sizes": {-1: None, "type": "dynamic"}}

_BLOCK_FORMATS: dict[Any, str] = {
    ((2, 1), 16, (4, 3)): "nvfp4",
    ((2, 1), 32, (8, 0)): "mxfp4",
    ((4, 3), 32, (8, 0)): "mxfp8",
}
_ROW_FORMATS: dict[Any, str] = {(4, 3): "fp8_e4m3", 8: "int8"}

WEIGHTS = ("nvfp4", "fp8", "int8")
"""Formats of ``quantize_weights``."""


def register() -> None:
    """Give every SSM mixer that ModelOpt converts from now on a ``state_read_quantizer``, disabled at first.

    Call it before ``mtq.quantize`` and before ``mto.restore``. Calling it again does nothing.
    """
    CUSTOM_MODEL_PLUGINS.add(_register_mixers)
    if not is_registered_quant_backend(BACKEND):
        register_quant_backend(BACKEND, _quantize_block_format)


def on_any_device(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a ModelOpt config whose NVFP4, MXFP4 and MXFP8 quantizers use our codec, which also runs on a CPU.

    ModelOpt's own kernels of these formats need a GPU. The result is what they compute, but for docs/formats.md.
    """
    register()
    ours: dict[str, Any] = copy.deepcopy(dict(config))
    for entry in ours["quant_cfg"]:
        cfgs = entry.get("cfg") or []
        for cfg in cfgs if isinstance(cfgs, list) else [cfgs]:
            if _block_format(cfg.get("num_bits", 8), cfg.get("block_sizes")) is not None and not cfg.get("backend"):
                cfg["backend"] = BACKEND
    return ours


def quantize_weights(model: nn.Module, format: str) -> nn.Module:
    """A copy of ``model`` with the weights that ModelOpt's preset for ``format`` quantises, rounded to it.

    Activations stay as they are. ``nvfp4``: blocks of 16 along the inputs; ``fp8``: one scale per tensor; ``int8``:
    one per output channel. The rounding is folded into the copy's weights.
    """
    if format not in WEIGHTS:
        raise unknown_name("weight format", format, WEIGHTS)
    if format == "fp8":
        config: dict[str, Any] = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
        config["quant_cfg"] += [{"quantizer_name": "*input_quantizer", "enable": False}]
    else:
        config = {"nvfp4": mtq.W4A16_NVFP4_CFG, "int8": mtq.INT8_WEIGHT_ONLY_CFG}[format]
    config = on_any_device(config)
    # ModelOpt tells on standard output what it does; that is for this command's words.
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        quantized = mtq.quantize(copy.deepcopy(model), config)
        mtq.fold_weight(quantized)
    return quantized


class StateReadQuantizer(TensorQuantizer):
    """The quantizer of one layer's read copy. Its scales are always those of the state at hand: nothing to calibrate.

    Called with a state [..., V, K] it rounds it as the copy would be. Disabled, it says that outputs read the FP32
    checkpoint.
    """

    def policy(self) -> StatePolicy:
        """The StatePolicy that this quantizer's attributes spell. Raises InvalidValueError for what it has not."""
        if not self.is_enabled:
            return StatePolicy()
        name = _block_format(self.num_bits, self.block_sizes) or _row_format(self.num_bits, self.block_sizes)
        if name is None:
            raise InvalidValueError(
                f"a state_read_quantizer has num_bits {self.num_bits} and block_sizes {self.block_sizes}; a state has "
                "the formats NVFP4, MXFP4, MXFP8, FP8 and INT8 of quantize_state.integrations.modelopt"
            )
        options: dict[str, Any] = {"read": name}
        if isinstance(self.block_sizes, dict) and self.block_sizes.get("four_over_six"):
            options["scale_rule"] = "four_over_six"
        if self.rotate_is_enabled:
            options["rotation"] = {None: "hadamard", 16: "hadamard16"}.get(self.rotate_block_size)
            if options["rotation"] is None:
                raise InvalidValueError(
                    f"rotate of a state_read_quantizer has block_size {self.rotate_block_size}; it must be 16 or None"
                )
        known = [f.name for f in fields(StatePolicy)]
        for key, value in (getattr(self, "backend_extra_args", None) or {}).items():
            if key not in known:
                raise unknown_name("key in backend_extra_args of a state_read_quantizer:", str(key), known)
            options[key] = value
        return StatePolicy(**options)

    def enable_calib(self) -> None:
        """Nothing to calibrate."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_enabled:
            return inputs
        policy = self.policy()
        assert policy.read is not None
        return fake_quantize(inputs, *policy.how(policy.read)).to(inputs.dtype)


class _StateMixer(QuantModule):
    """What ModelOpt puts in front of a mixer's class; the forward stays the mixer's own."""

    def _setup(self) -> None:
        quantizer = StateReadQuantizer()
        quantizer.disable()
        self._register_temp_attribute("state_read_quantizer", quantizer)


def _register_mixers(model: nn.Module) -> None:
    try:
        kinds = {type(layer.module) for layer in find_layers(model)}
    except UnsupportedModelError:
        return
    for kind in kinds:
        known = QuantModuleRegistry.get(kind)
        if known is not None and issubclass(known, _StateMixer):
            continue
        if kind in QuantModuleRegistry._registry:
            # ModelOpt takes what is called Attention for attention, KDA too, and would quantise a KV cache it hasn't.
            QuantModuleRegistry.unregister(kind)
        mtq.register(original_cls=kind, quantized_cls=_StateMixer)


def _block_format(num_bits: Any, block_sizes: Any) -> str | None:
    if not isinstance(block_sizes, Mapping) or block_sizes.get("type") != "dynamic":
        return None
    size, scale_bits = block_sizes.get(-1), block_sizes.get("scale_bits")
    return _BLOCK_FORMATS.get((_bits(num_bits), size, _bits(scale_bits)))


def _row_format(num_bits: Any, block_sizes: Any) -> str | None:
    """FP8 and INT8; a state's scales are per row, however ModelOpt would share them."""
    if block_sizes and (block_sizes.get(-1) is not None or block_sizes.get("scale_bits") is not None):
        return None
    return _ROW_FORMATS.get(_bits(num_bits))


def _bits(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _quantize_block_format(inputs: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """The entry point of our backend: fake quantisation as ModelOpt's quantizer says, by our codec."""
    name = _block_format(quantizer.num_bits, quantizer.block_sizes)
    if name is None:
        raise InvalidValueError(
            f"the backend {BACKEND!r} has NVFP4, MXFP4 and MXFP8, and the quantizer says num_bits "
            f"{quantizer.num_bits}, block_sizes {quantizer.block_sizes}"
        )
    with torch.no_grad():
        tile = inputs.detach().to(torch.float32).reshape(-1, inputs.shape[-1])
        if name == "nvfp4":
            # ModelOpt's second-level scale is of a calibrated largest magnitude. One more row that holds it makes it
            # the codec's; what is larger saturates.
            amax = quantizer._get_amax(inputs).to(torch.float32).max()
            rows = torch.cat([tile.clamp(-amax, amax), amax.expand(1, tile.shape[1])])
            values = fake_quantize(rows, name, check_finite=False)[:-1]
        else:
            values = fake_quantize(tile, name, check_finite=False)
        values = values.view(inputs.shape).to(inputs.dtype)
    return _StraightThrough.apply(inputs, values) if inputs.requires_grad else values


class _StraightThrough(torch.autograd.Function):
    """Rounded values whose gradient is that of the values before rounding, as ModelOpt's own quantizers have it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
