"""Triton kernels of flash-linear-attention behind the signatures that transformers' layers call.

Used by ``train.py`` alone, and only where CUDA and the package ``fla-core`` are present; elsewhere training
falls back to transformers' own torch functions, which are right but slow.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from .mixers import ChunkFunction, mamba2_step, modeling_module, replaced, torch_chunk_function

MAX_ERROR = 0.05  # relative, bfloat16 kernel against float32 torch, in the output and every gradient


def fast_available() -> bool:
    """Whether the kernels can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("fla") is not None


def thin_autotuning(keep: int = 2) -> None:
    """Let every kernel try ``keep`` launch configurations instead of dozens.

    Tuning them all takes minutes of a run that lasts ten and gains a few percent. Call before importing fla.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        usual = [config for config in configs if config.num_warps == 4 and config.num_stages <= 3]
        original(self, fn, arg_names, (usual or list(configs))[:keep], *args, **kwargs)

    Autotuner.__init__ = init


def fast_chunk_function(family: str) -> ChunkFunction:
    """The kernel for a family, taking the arguments of transformers' chunk function.

    The kernels used take a decay per channel. GDN and Mamba-2 have one per head and repeat it: their own
    kernels have a backward pass that Triton 3.4 to 3.7 compiles wrongly for Hopper GPUs.
    """
    if family in ("gdn", "kda"):
        from fla.ops.kda import chunk_kda

        def delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: Any, beta: Any, **_: Any) -> Any:
            if g.ndim == 3:
                g = g[..., None].expand(*g.shape, key.shape[-1])
            return chunk_kda(query, key, value, g.contiguous(), beta.float(), use_qk_l2norm_in_kernel=True)

        return delta_rule

    from fla.ops.gla import chunk_gla

    def mamba2(
        x: torch.Tensor, dt: Any, A: Any, B: Any, C: Any, *_: Any, D: Any, dt_bias: Any, dt_limit: Any, **__: Any
    ) -> Any:
        # Mamba-2 is gated linear attention with q = C, k = B, v = Δ·x and the log-decay Δ·A.
        step = mamba2_step(dt, dt_bias, dt_limit)
        decay = (step * A)[..., None].expand(*step.shape, B.shape[-1]).contiguous()
        B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
        y, _ = chunk_gla(C, B, (x * step[..., None]).to(x.dtype), decay, scale=1.0)
        return y + (x * D[:, None]).to(x.dtype)

    return mamba2


def fast_conv(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Any:
    """The short causal convolution; torch's depthwise one is slow to differentiate."""
    from fla.modules.causal_conv1d import causal_conv1d

    y, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
    return y.transpose(1, 2)


@contextlib.contextmanager
def fast_kernels(family: str) -> Iterator[tuple[ChunkFunction, dict[str, float]]]:
    """Run a family's layers on the kernels inside the context.

    Gives the chunk function in use and its errors against torch. A kernel that fails or disagrees on this
    machine is not used: training is then slower, not wrong.
    """
    function = torch_chunk_function(family)
    errors: dict[str, float] = {}
    if not fast_available():
        yield function, errors
        return
    try:
        errors = compare_with_torch(family)
        if max(errors.values()) < MAX_ERROR:
            function = fast_chunk_function(family)
    except Exception as problem:
        print("the kernel does not run here:", repr(problem), flush=True)
    print(family, "relative error of the kernel:", errors, "runs on", function.__name__, flush=True)
    with replaced(family, function), replaced(family, fast_conv, "causal_conv1d_fn"):
        yield function, errors


def compare_with_torch(family: str, tokens: int = 512) -> dict[str, float]:
    """Relative error of the kernel against transformers' torch function, in output and gradients.

    Random inputs of the models' shapes in bfloat16 for the kernel, the same numbers in float32 for torch.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16().float()

    if family == "mamba2":
        inputs = [normal(2, tokens, 8, 64), normal(2, tokens, 8), -normal(8).exp()]
        inputs += [normal(2, tokens, 2, 128) * 0.3, normal(2, tokens, 2, 128) * 0.3]
        extra = {"chunk_size": 64, "D": normal(8), "dt_bias": normal(8) - 4, "dt_softplus": True}
        extra["dt_limit"] = (0.0, float("inf"))
        half = (0, 3, 4)
    else:
        key_heads = 2 if family == "gdn" else 4
        inputs = [normal(2, tokens, key_heads, 128), normal(2, tokens, key_heads, 128), normal(2, tokens, 4, 128)]
        decay = normal(2, tokens, 4) if family == "gdn" else normal(2, tokens, 4, 128)
        inputs += [-(decay - 3).exp(), normal(2, tokens, 4).sigmoid()]
        extra = {"use_qk_l2norm_in_kernel": True}
        half = (0, 1, 2)

    def run(function: ChunkFunction, reduced: bool) -> list[torch.Tensor]:
        leaves = [value.clone().requires_grad_() for value in inputs]
        args = [leaf.bfloat16() if reduced and i in half else leaf for i, leaf in enumerate(leaves)]
        output = function(*args, **extra)
        output = (output[0] if isinstance(output, tuple) else output).float()
        weights = torch.randn(output.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        return [output, *torch.autograd.grad((output * weights).sum(), leaves)]

    names = ["output", *(f"grad{i}" for i in range(len(inputs)))]
    pairs = zip(names, run(fast_chunk_function(family), True), run(torch_chunk_function(family), False), strict=True)
    errors = {name: ((fast - slow).norm() / slow.norm()).item() for name, fast, slow in pairs}
    x, weight = normal(2, 768, 96), normal(768, 4)
    slow = modeling_module(family).causal_conv1d_fn(x, weight, None, activation="silu")
    errors["conv"] = ((fast_conv(x, weight, None, "silu") - slow).norm() / slow.norm()).item()
    return errors
