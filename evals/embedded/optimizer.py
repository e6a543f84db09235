"""Muon for the matrices inside the layers, AdamW for everything else.

Muon orthogonalises the momentum of a weight matrix, so every direction of the update gets the same size. At
this scale it reaches a given loss in clearly fewer tokens than AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

WEIGHT_DECAY = 0.1


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices, for a stack [n, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised; matrices of one shape are handled as a stack to spare kernel launches.

    The step is scaled so that its elements have the size of AdamW's, hence one learning rate for both.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        super().__init__([{"params": group} for group in shapes.values()], {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            parameters, momentum = group["params"], group["momentum"]
            gradients = torch.stack([parameter.grad for parameter in parameters])
            state = self.state[parameters[0]]
            buffer = state.setdefault("momentum", torch.zeros_like(gradients))
            buffer.lerp_(gradients, 1 - momentum)
            update = orthogonalise(gradients.lerp(buffer, momentum))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * WEIGHT_DECAY)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-group["lr"] * scale)


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Split the parameters. Narrow matrices (gates with one row per head) are vectors in spirit: AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and min(parameter.shape) >= 16 and ".layers." in name
        (matrices if hidden else others).append(parameter)
    fused = all(parameter.is_cuda for parameter in others)
    return [Muon(matrices), torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)]
