"""What the memory gives: a copy and a read-only sum, each one launch over a buffer far larger than the caches.

Plain Triton kernels, as those they are compared with: a ``copy_`` captured in a CUDA graph becomes a memcpy node,
which on an H200 runs at two thirds of the speed of a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .device.targets import tl, triton
from .launch import Launch, run

BLOCKS = (2048, 4096, 8192)
"""Elements per program; the fastest counts."""


@triton.jit
def copy_kernel(p_from, p_to, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_to + o, tl.load(p_from + o))


@triton.jit
def sum_kernel(p_from, p_sums, BLOCK: tl.constexpr):
    """One partial sum per program: 4 bytes written for BLOCK · 4 read."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_sums + tl.program_id(0), tl.sum(tl.load(p_from + o), axis=0))


def copy(source: Tensor, target: Tensor, block: int = 4096) -> None:
    """``target`` ← ``source``, both float32 and a multiple of ``block`` long."""
    _check(source, block)
    run(copy_kernel, (source.numel() // block,), Launch(warps=4), source, target, BLOCK=block)


def read(source: Tensor, sums: Tensor, block: int = 4096) -> None:
    """Partial sums of ``source`` float32 into ``sums`` [numel // block] float32."""
    _check(source, block)
    run(sum_kernel, (source.numel() // block,), Launch(warps=4), source, sums, BLOCK=block)


def _check(source: Tensor, block: int) -> None:
    if source.dtype != torch.float32 or source.numel() % block or not source.is_contiguous():
        raise ValueError(f"a contiguous float32 tensor of a multiple of {block} elements is needed")
