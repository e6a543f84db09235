"""Teacher forcing through vLLM's own decode path: every step samples the token that is known, and its logits are kept.

For an engine whose scheduler is in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``); its workers may be in others.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

KEY = "quantize_state_forced"


class Forced(LogitsProcessor):
    """Samples the tokens of a request's ``extra_args[KEY]`` = (number, tokens); others are left alone."""

    logits: ClassVar[dict[tuple[int, int], Tensor]] = {}
    """(number of the request, tokens generated before) → logits [vocabulary], float32."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, generated in batch_update.added:
            self._rows.pop(row, None)
            if forced := (params.extra_args or {}).get(KEY):
                self._rows[row] = (forced[0], forced[1], generated)
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if second is not None and direction.name == "SWAP":
                self._rows[source] = second

    def apply(self, logits: Tensor) -> Tensor:
        for row, (number, tokens, generated) in self._rows.items():
            # A prompt's earlier chunks pass here too: the last one to write is the one that counts.
            Forced.logits[number, len(generated)] = logits[row].float().cpu().clone()
            logits[row] = -torch.inf
            logits[row, tokens[len(generated)]] = 0.0
        return logits


def forced_logits(llm: Any, prompts: list[list[int]], tokens: list[list[int]]) -> list[Tensor]:
    """For each prompt, the logits [N, vocabulary] from which its N ``tokens`` were to be predicted.

    ``llm`` is a ``vllm.LLM(..., logits_processors=[Forced])``. All but the first row come from decode steps.
    """
    llm.collective_rpc(_take_logits)
    parameters = [
        SamplingParams(
            max_tokens=len(known), temperature=0.0, ignore_eos=True, detokenize=False, extra_args={KEY: (i, known)}
        )
        for i, known in enumerate(tokens)
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    for output, known in zip(outputs, tokens, strict=True):
        assert list(output.outputs[0].token_ids) == list(known)
    # Ranks of a tensor-parallel model have the same logits, stages of a pipeline but for the last have none.
    logits = next(found for found in llm.collective_rpc(_take_logits) if found)
    return [torch.stack([logits[i, t] for t in range(len(known))]) for i, known in enumerate(tokens)]


def _take_logits(worker: Any) -> dict[tuple[int, int], Tensor]:
    taken, Forced.logits = Forced.logits, {}
    return taken


def layers_with_copies(llm: Any) -> list[list[str]]:
    """The names of the layers that have a read copy, for each worker of the engine."""
    return llm.collective_rpc(_layers_with_copies)


def _layers_with_copies(worker: Any) -> list[str]:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer.prefix for layer in layers if getattr(layer, "read_copy", None) is not None]
