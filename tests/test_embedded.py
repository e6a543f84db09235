"""The embedded models: what the evaluation rests on, and identity through them as through tiny random ones."""

import pytest
import torch

from quantize_state.adapters import attach
from quantize_state.evals.embedded import EMBEDDED, embedded_path
from quantize_state.evals.embedded.check import LONG, MAX_BITS, MIN_STATE_BITS
from quantize_state.evals.embedded.corpus import as_array, heldout_text
from quantize_state.evals.embedded.measure import bits_per_byte, half_lives, sequences
from quantize_state.evals.embedded.mixers import forgetting, replaced, torch_chunk_function, with_chunk
from quantize_state.evals.models import load_model
from quantize_state.evals.rollout import Rollout
from quantize_state.kernels.step import folded

IDENTITY_KL = 1e-9
"""Nats per token between two FP32 evaluations that sum in other orders; measured near 1e-12."""
IDENTITY_STATE = 1e-4
"""Relative, after 200 tokens through eight layers: inputs of the deeper ones differ by FP32 rounding already."""


@pytest.fixture(scope="module", params=EMBEDDED)
def loaded(request):
    if request.param == "tiny-kda":
        pytest.importorskip("transformers.models.kimi_linear", reason="this transformers has no Kimi-Linear")
    return load_model(request.param, device="cpu")


def test_files_are_small_and_complete(loaded):
    files = {path.name: path.stat().st_size for path in embedded_path(loaded.name).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json", "README.md"} <= set(files)
    assert max(files.values()) < 16 * 2**20


def test_ids_are_bytes(loaded):
    text = heldout_text()[:2000] + " €漢🙂\t\n"
    assert loaded.tokenizer(text)["input_ids"] == list(text.encode())
    assert loaded.tokenizer.decode(list(text.encode())) == text


def test_it_predicts_well_and_only_with_its_state(loaded):
    family = EMBEDDED[loaded.name].family
    ids = sequences(as_array(heldout_text().encode()), 2048, 2048)
    function = with_chunk(torch_chunk_function(family), 16)
    with replaced(family, function):
        bits = bits_per_byte(loaded.model, ids)
        lives = half_lives(loaded.model, family, ids[:, :512])
    with replaced(family, forgetting(function)):
        forgetful = bits_per_byte(loaded.model, ids)
    assert bits < MAX_BITS
    assert forgetful - bits > MIN_STATE_BITS
    assert int((lives > LONG).sum()) > 0


@pytest.mark.parametrize("arm", ["reference", "replay-fp32"])
def test_an_fp32_policy_is_the_untouched_model(loaded, arm):
    """In logits and in states, for a chunk, then tokens one by one."""
    ids = torch.tensor([list(heldout_text().encode()[:200])])
    with attach(loaded.model, None) as handle:
        ours, theirs = Rollout(handle, arm), Rollout(handle, None)
        pairs = []
        for run in (ours, theirs):
            run.prefill(ids[:, :150])
            pairs.append(torch.cat([run.advance(ids[:, t : t + 1]) for t in range(150, 200)], dim=1))
        p, q = (logits.double().log_softmax(-1) for logits in pairs)
        assert float((p.exp() * (p - q)).sum(-1).mean()) < IDENTITY_KL
        for layer in handle.layers:
            state = folded(handle.states(ours.cache)[layer.name])
            held = theirs.cache.layers[layer.module.layer_idx].recurrent_states[0]
            held = held if layer.family == "mamba2" else held.mT
            assert (state - held).norm() < IDENTITY_STATE * held.norm()
