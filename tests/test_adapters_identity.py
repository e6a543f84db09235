"""An exact policy through a real model gives the untouched model's logits, tokens and states, for every class."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_models import FAMILY, TINY_MODELS, build, cache_of, run, states, steps, tokens

from quantize_state.adapters import attach, supported_model_types
from quantize_state.quant.policy import StatePolicy

torch.set_num_threads(1)

# Two exact computations differ by the order of their float32 sums alone, a few units of 1.2e-7 in each product. What
# reaches logits (of size 1) and states after 2 or 3 layers of a random network is below 1e-5 of their size, and KL is
# quadratic in the logits' difference.
TOLERANCE = {"kl": 1e-9, "state": 1e-5}

EXACT = {
    "replay": StatePolicy(window=7),
    "recurrence": StatePolicy(window=1),
    "decoupled": StatePolicy(read="fp32", window=7),
}

PROMPT, DECODED, MORE = 9, 18, 11
IDS = tokens(2, 60)


@cache
def model_of(name: str) -> torch.nn.Module:
    return build(name)


@cache
def untouched(name: str, *cuts: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits and final states of the model as it is, fed in chunks that end at ``cuts``."""
    logits, held = run(model_of(name), *chunks(*cuts))
    return logits, states(held)


def chunks(*cuts: int) -> list[torch.Tensor]:
    return [IDS[:, a:b] for a, b in zip((0, *cuts), cuts, strict=False)]


def assert_same(got: torch.Tensor, expected: torch.Tensor, got_states: dict, expected_states: dict) -> None:
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.abs().max() < TOLERANCE["kl"]
    assert got_states.keys() == expected_states.keys() and got_states
    for layer, state in expected_states.items():
        assert (got_states[layer] - state).norm() / state.norm() < TOLERANCE["state"], f"layer {layer}"


def test_every_supported_class_has_a_tiny_model():
    kinds = {kind for kinds in supported_model_types().values() for kind in kinds}
    assert {name.split("-")[0] for name in TINY_MODELS} == kinds
    for family, kinds in supported_model_types().items():
        assert {FAMILY[kind] for kind in kinds} == {family}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_tiny_models_use_their_states(name):
    """Otherwise nothing here would notice a wrong state."""
    model, cut = model_of(name), PROMPT + DECODED
    _, held = run(model, IDS[:, :cut])
    for state in states(held).values():
        state.zero_()
    forgot, _ = run(model, IDS[:, cut : cut + 5], cache=held)
    p = untouched(name, cut, cut + 5)[0][:, -5:].double().log_softmax(-1)
    kl = (p.exp() * (p - forgot.double().log_softmax(-1))).sum(-1)
    assert kl.mean() > 1e5 * TOLERANCE["kl"]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_one_forward(name):
    expected, expected_states = untouched(name, PROMPT + DECODED)
    with attach(model_of(name), "replay-fp32"):
        got, held = run(model_of(name), IDS[:, : PROMPT + DECODED])
    assert_same(got, expected, states(held), expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("policy", EXACT)
def test_prefill_then_decode(name, policy):
    """18 steps cross two flushes of a window of 7, and end inside the third."""
    model, cuts = model_of(name), (PROMPT, *range(PROMPT + 1, PROMPT + DECODED + 1))
    expected, expected_states = untouched(name, *cuts)
    with attach(model, EXACT[policy]) as handle:
        got, held = run(model, *chunks(*cuts))
        assert not states(held) and len(handle.states(held)) == len(handle.layers)
    assert_same(got, expected, states(held), expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_cache_is_continued_with_several_tokens(name):
    """Prompt, steps, more prompt in the middle of a window, and steps again."""
    cuts = (PROMPT, *range(PROMPT + 1, PROMPT + 6), PROMPT + 6 + MORE, *range(PROMPT + 7 + MORE, PROMPT + 27 + MORE))
    expected, expected_states = untouched(name, *cuts)
    with attach(model_of(name), "replay-fp32"):
        got, held = run(model_of(name), *chunks(*cuts))
    assert_same(got, expected, states(held), expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_prompt_of_one_token(name):
    cuts = tuple(range(1, 20))
    expected, expected_states = untouched(name, *cuts)
    with attach(model_of(name), "replay-fp32"):
        got, held = run(model_of(name), *chunks(*cuts))
    assert_same(got, expected, states(held), expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_without_a_cache(name):
    model, ids = model_of(name), IDS[:, :PROMPT]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with attach(model, "decoupled-fp32") as handle:
            got = model(ids, use_cache=False).logits
            assert handle.state_bytes()["total"] == 0
    assert_same(got, expected, *({0: torch.ones(1)},) * 2)


def generated(model, ids, mask=None, **options):
    options = {"max_new_tokens": 18, "do_sample": False} | options
    mask = torch.ones_like(ids) if mask is None else mask
    options |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, attention_mask=mask, **options)
    return output.sequences, torch.stack(output.logits, dim=1), cache_of(output)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(name, beams):
    model, ids, options = model_of(name), IDS[:, :PROMPT], {"num_beams": beams, "num_return_sequences": beams}
    expected_ids, expected, untouched_cache = generated(model, ids, **options)
    with attach(model, "replay-fp32"):
        got_ids, got, held = generated(model, ids, **options)
    assert torch.equal(got_ids, expected_ids)
    assert_same(got, expected, states(held), states(untouched_cache))


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "zamba2", "qwen3_next", "glm5_next"])
def test_generate_with_a_static_cache(name):
    """In every kind of cache layer that has one: the state alone, or beside keys and values."""
    model, ids, options = model_of(name), IDS[:, :PROMPT], {"cache_implementation": "static"}
    expected_ids, expected, untouched_cache = generated(model, ids, **options)
    with attach(model, "replay-fp32"):
        got_ids, got, held = generated(model, ids, **options)
    assert torch.equal(got_ids, expected_ids)
    assert_same(got, expected, states(held), states(untouched_cache))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_left_padded_batch_of_unequal_lengths(name):
    model, ids = model_of(name), tokens(3, PROMPT, seed=1)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 3, 6)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    expected_ids, expected, untouched_cache = generated(model, ids, mask)
    with attach(model, "replay-fp32"):
        got_ids, got, held = generated(model, ids, mask)
    assert torch.equal(got_ids, expected_ids)
    assert_same(got, expected, states(held), states(untouched_cache))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_rows_are_reordered(name):
    """What beam search does to a cache, in the middle of a window, where beams are surely exchanged."""
    model, order = model_of(name), torch.tensor([1, 1])
    results = []
    for policy in (None, "replay-fp32"):
        handle = attach(model, policy) if policy else None
        _, held = run(model, *chunks(PROMPT, *range(PROMPT + 1, PROMPT + 6)))
        held.reorder_cache(order)
        logits, held = run(model, *steps(IDS[:, PROMPT + 5 : PROMPT + 25]), cache=held)
        if handle:
            handle.detach()
        results.append((logits, states(held)))
    (expected, expected_states), (got, got_states) = results
    assert_same(got, expected, got_states, expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_teacher_forced_chunk_is_what_the_untouched_model_decodes(name):
    """Also where transformers' chunk gives something else: NemotronH and Zamba2 limit Δ in prompts, not in decode."""
    model, cuts = model_of(name), (PROMPT, *range(PROMPT + 1, PROMPT + DECODED + 1))
    expected, expected_states = untouched(name, *cuts)
    with attach(model, "replay-fp32-w7") as handle:
        prompt, held = run(model, IDS[:, :PROMPT])
        handle.teacher_forced = True
        rest, held = run(model, IDS[:, PROMPT : PROMPT + DECODED], cache=held)
    assert_same(torch.cat([prompt, rest], dim=1), expected, states(held), expected_states)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_training_mode_without_a_cache(name):
    """Mamba-2 layers then take a shortcut over the whole layer, which must not pass by the state."""
    model = build(name).train()
    with torch.no_grad():
        expected = model(IDS[:, :PROMPT], use_cache=False).logits
        seen = []
        with attach(model, "replay-fp32") as handle:
            handle.observer = lambda layer, *_: seen.append(layer.name)
            got = model(IDS[:, :PROMPT], use_cache=False).logits
    assert seen == [layer.name for layer in handle.layers]
    assert_same(got, expected, *({0: torch.ones(1)},) * 2)
