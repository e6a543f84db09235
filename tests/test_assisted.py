"""Assisted generation on attached models: the tokens of plain decoding, caches that roll back, classes given back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from tiny_models import TINY_MODELS, build, cache_of, run, steps, tokens
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from quantize_state.adapters import attach, cache_argument
from quantize_state.quant.errors import InvalidValueError

torch.set_num_threads(1)

TOLERANCE = {
    # Exact arithmetic in another order: float32 sums of a few dozen terms.
    "exact": 1e-5,
    # With low precision, a code may round the other way where what it encodes differs in the last bit.
    "code": 2e-3,
}

FAMILIES = [name for name in ("bamba", "qwen3_next", "kimi_linear", "glm5_next") if name in TINY_MODELS][:3]
PATTERN = torch.cat([tokens(1, 6, seed=3), tokens(1, 6, seed=3), tokens(1, 5, seed=1)], dim=1)


def close(got, expected, kind="exact"):
    assert (got - expected).norm() / expected.norm() < TOLERANCE[kind]


def generate(model, ids, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def same_text(plain, assisted, kind="code"):
    """Equal tokens from close logits, up to a token whose two best logits are as close: a tie."""
    ours, theirs = torch.stack(assisted.logits)[:, 0], torch.stack(plain.logits)[:, 0]
    new = plain.sequences.shape[1] - len(theirs)
    differ = (plain.sequences != assisted.sequences)[0, new:].nonzero()
    same = int(differ[0]) + 1 if len(differ) else len(theirs)
    close(ours[:same], theirs[:same], kind)
    if len(differ):
        best = theirs[same - 1].topk(2).values
        assert best[0] - best[1] < TOLERANCE[kind] * theirs[same - 1].norm(), f"token {same} differs without a tie"


def helper_of(model, noise):
    """A copy of the model that is often right, drafting five tokens at a time."""
    helper = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in helper.parameters():
            scale = noise * parameter.std() if parameter.numel() > 1 else 0.0
            parameter += scale * torch.randn(parameter.shape, generator=rng)
    settings = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    helper.generation_config.update(assistant_confidence_threshold=0.0, **settings)
    return helper


@pytest.mark.parametrize("name", TINY_MODELS)
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(name):
    model = build(name)
    if cache_argument(model) == "cache_params":
        pytest.skip("transformers before 5.24 finds no cache of this class to roll back")
    with attach(model, "decoupled-nvfp4-w5") as handle:
        plain = generate(model, PATTERN, max_new_tokens=24)
        assisted = generate(model, PATTERN, max_new_tokens=24, prompt_lookup_num_tokens=6)
        same_text(plain, assisted)
        found = handle.acceptance
        assert found.steps + found.accepted + 1 == 24 and found.drafted > found.accepted
        assert found.length == 1 + found.accepted / found.steps


@pytest.mark.parametrize("arm", ["replay-fp32-w7", "decoupled-bf16-nvfp4-w3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_assistant_with_states_of_its_own(name, arm):
    """Drafts of which many are accepted; the assistant is attached too, and rolls back over several forwards."""
    model = build(name)
    helper, kind = helper_of(model, 0.02), "code" if "decoupled" in arm else "exact"
    with attach(model, arm) as handle, attach(helper, "decoupled-nvfp4-w4") as other:
        plain = generate(model, PATTERN, max_new_tokens=24)
        same_text(plain, generate(model, PATTERN, max_new_tokens=24, assistant_model=helper), kind)
        assert 1.3 < handle.acceptance.length < 6, handle.acceptance
        assert other.acceptance.steps == 0


@pytest.mark.parametrize("arm", ["reference", "replay-fp32-w5"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_assistant_equal_to_its_model_is_always_right(name, arm):
    """Taking back, and what it reads of its prompt, leave no trace in the assistant."""
    model = build(name)
    with attach(model, arm) as handle, attach(twin := helper_of(model, 0.0), arm):
        generate(model, PATTERN, max_new_tokens=24, assistant_model=twin)
        assert handle.acceptance.accepted == handle.acceptance.drafted > 15


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_shorter_than_the_convolution(name, length):
    model = build(name)
    with attach(model, "decoupled-nvfp4-w5"):
        ids = PATTERN[:, :length]
        same_text(
            generate(model, ids, max_new_tokens=12),
            generate(model, ids, max_new_tokens=12, prompt_lookup_num_tokens=6),
        )


@pytest.mark.parametrize("name", [*FAMILIES, "nemotron_h"])
@pytest.mark.parametrize("arm", ["decoupled-nvfp4-w6", "coupled-fp8", "replay-fp32"])
def test_rolling_back_a_cache(name, arm):
    """Wrong tokens, fed singly or together and over window ends, leave no trace once they are cropped."""
    model = build(name)
    ids, wrong = tokens(1, 40, seed=5), tokens(1, 40, seed=6)
    kind = "exact" if arm == "replay-fp32" else "code"
    with attach(model, arm) as handle, torch.no_grad():
        expected, plain = run(model, ids[:, :9], *steps(ids[:, 9:]))
        handle.verifying = True  # as generate has it for its model
        logits, cache = run(model, ids[:, :9])
        handle.verifying = False
        cache.activate_past_recording()
        seen, got = 9, [logits]
        for good, bad, singly in [
            (1, 0, True),
            (2, 3, False),
            (0, 4, True),
            (3, 9, True),
            (9, 1, False),
            (4, 8, False),
        ]:
            chunk = torch.cat([ids[:, seen : seen + good], wrong[:, seen + good : seen + good + bad]], dim=1)
            logits, cache = run(model, *(steps(chunk) if singly else [chunk]), cache=cache)
            cache.crop(-bad)
            got.append(logits[:, :good])
            seen += good
        close(torch.cat(got, dim=1), expected[:, :seen], kind)
        with pytest.raises(InvalidValueError, match="can't take back 1 tokens: the last 0 are kept"):
            cache.crop(-1)
        rest, _ = run(model, *steps(ids[:, seen:]), cache=cache)
        close(rest, expected[:, seen:], kind)
        for one, other in zip(handle.states(plain).values(), handle.states(cache).values(), strict=True):
            assert int(other.position[0]) == seen, "all since the last crop may still be taken back"
            assert int(one.position[0]) == 40


@pytest.mark.parametrize("how", ["copied", "reordered", "pickled", "left"])
def test_drafts_travel_with_a_cache(how):
    model = build("qwen3_next")
    ids = tokens(1, 30, seed=5)
    handle = attach(model, "replay-fp32-w6")
    with handle:
        expected, _ = run(model, ids[:, :9], *steps(ids[:, 9:]))
        _, cache = run(model, ids[:, :9])
        cache.activate_past_recording()
        run(model, ids[:, 9:20], cache=cache)
        if how == "copied":
            copied = copy.deepcopy(cache)
            run(model, tokens(1, 5), cache=cache)
            cache = copied
        elif how == "reordered":
            cache.reorder_cache(torch.tensor([0]))
        elif how == "pickled":
            cache = pickle.loads(pickle.dumps(cache))
        else:
            handle.detach()
        rest, cache = run(model, ids[:, 20:24], cache=cache)
        close(rest, expected[:, 20:24])
        if how in ("copied", "reordered"):
            cache.crop(-4)
            close(run(model, ids[:, 20:], cache=cache)[0], expected[:, 20:])


def test_after_generate_the_cache_goes_on_plainly():
    model = build("bamba")
    with attach(model, "decoupled-nvfp4-w6"):
        plain = generate(model, PATTERN, max_new_tokens=12)
        assisted = generate(model, PATTERN, max_new_tokens=12, prompt_lookup_num_tokens=4)
        last = plain.sequences[:, -1:]
        ids = [last, *steps(tokens(1, 9, seed=8))]
        close(run(model, *ids, cache=cache_of(assisted))[0], run(model, *ids, cache=cache_of(plain))[0], "code")
        assert not any(getattr(layer, "record_past", False) for layer in cache_of(assisted).layers[:1])


def test_a_second_turn_begins_with_a_prompt():
    """Which is exact and renews the copy, although the cache holds a state already."""
    model, seen = build("qwen3_next"), []
    with attach(model, "decoupled-nvfp4-w6") as handle:
        first = generate(model, PATTERN, max_new_tokens=6, prompt_lookup_num_tokens=4)
        cache, ids = cache_of(first), torch.cat([first.sequences, PATTERN], dim=1)
        before = cache.get_seq_length()
        handle.observer = lambda layer, inputs, y, state: seen.append((int(state.position), int(state.cursor)))
        generate(model, ids, max_new_tokens=6, prompt_lookup_num_tokens=4, **{cache_argument(model): cache})
    assert before < seen[0][0] and seen[0] == seen[1] and seen[0][1] == 0, seen


def test_a_sampled_text_may_be_drafted():
    model = build("qwen3_next")
    with attach(model, "decoupled-nvfp4-w6") as handle:
        torch.manual_seed(3)
        ids = model.generate(
            PATTERN,
            attention_mask=torch.ones_like(PATTERN),
            do_sample=True,
            max_new_tokens=20,
            prompt_lookup_num_tokens=4,
        )
        assert ids.shape[1] == PATTERN.shape[1] + 20 and handle.acceptance.steps > 0


def test_a_model_that_is_forgotten_while_attached_is_freed():
    model = build("olmo_hybrid")  # a class of its own, since nobody gives this one back
    attach(model, "replay-fp32")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class TestClassesAreGivenBack:
    """transformers refuses assisted generation as before: outside, for others, and for layers without a policy."""

    def classes(self, model):
        return {kind: dict(kind.__dict__) for kind in (type(model), LinearAttentionCacheLayerMixin)}

    def refused(self, model):
        with pytest.raises(ValueError, match="not supported with stateful models"):
            generate(model, PATTERN, max_new_tokens=4, prompt_lookup_num_tokens=3)

    def test_afterwards(self):
        model = build("qwen3_next")
        before = self.classes(model)
        with attach(model, "replay-fp32"):
            assert self.classes(model) != before
            with attach(build("qwen3_next"), "replay-fp32"):
                pass
            assert self.classes(model) != before
        assert self.classes(model) == before
        self.refused(model)

    def test_meanwhile_for_other_models(self):
        model, other = build("qwen3_next"), build("qwen3_next")
        with attach(model, "replay-fp32"):
            self.refused(other)
            self.refused(copy.deepcopy(model))

    def test_layers_without_a_policy(self):
        model = build("qwen3_next")
        with attach(model, None):
            self.refused(model)

    def test_after_an_exception(self):
        def fails(layer, inputs, y, state):
            if layer.index == 1 and inputs.tokens > 1 and state.position[0]:
                raise ZeroDivisionError

        model = build("qwen3_next")
        with attach(model, "decoupled-nvfp4-w6") as handle:
            handle.observer = fails
            with pytest.raises(ZeroDivisionError):
                generate(model, PATTERN, max_new_tokens=30, prompt_lookup_num_tokens=4)
            handle.observer = None
            assert not handle.verifying
            same_text(
                generate(model, PATTERN, max_new_tokens=12),
                generate(model, PATTERN, max_new_tokens=12, prompt_lookup_num_tokens=4),
            )
