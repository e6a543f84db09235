"""Attaching and detaching: what a context changes, what it leaves alone, and that it gives everything back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
import transformers
from tiny_models import TINY_MODELS, build, cache_of, run, states, steps, tokens

from quantize_state.adapters import attach, cache_argument, find_layers
from quantize_state.adapters.cached import CachedState
from quantize_state.kernels.step import folded, scan, step
from quantize_state.quant.errors import InvalidValueError, QuantizeStateError, UnsupportedModelError
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.recipe import Recipe
from quantize_state.quant.state import DecodeState

torch.set_num_threads(1)

TOLERANCE = {
    # Exact arithmetic in another order: float32 sums of a few dozen terms.
    "exact": 1e-5,
}

FAMILIES = [name for name in ("bamba", "qwen3_next", "kimi_linear", "glm5_next") if name in TINY_MODELS][:3]
"""One class of each family; kimi_linear came to transformers later than glm5_next."""

IDS = tokens(2, 60)


def close(got, expected):
    assert (got - expected).norm() / expected.norm() < TOLERANCE["exact"]


def surroundings(model):
    """All that attaching may change: module globals, and hooks."""
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    return [dict(layer.namespace) for layer in find_layers(model)], hooks


@pytest.fixture(params=FAMILIES)
def model(request):
    model = build(request.param)
    before = surroundings(model)
    yield model
    after = surroundings(model)
    assert after[1] == before[1]
    for namespace, original in zip(after[0], before[0], strict=True):
        assert namespace.keys() == original.keys()
        assert all(namespace[name] is original[name] for name in original)


class TestRestore:
    def test_after_use(self, model):
        expected, _ = run(model, IDS)
        with attach(model, "coupled-nvfp4"):
            changed, _ = run(model, IDS[:, :5], *steps(IDS[:, 5:]))
        again, _ = run(model, IDS)
        assert torch.equal(again, expected) and not torch.equal(changed, expected)

    def test_after_an_exception_in_the_body(self, model):
        with pytest.raises(ZeroDivisionError), attach(model, "decoupled-nvfp4"):
            _, cache = run(model, IDS[:, :5], *steps(IDS[:, 5:8]))
            raise ZeroDivisionError
        assert states(cache)

    def test_after_an_exception_in_generate(self, model):
        def fails(layer, inputs, y, state):
            if int(state.position[0]) == 12:
                raise ZeroDivisionError

        handle = attach(model, "decoupled-nvfp4")
        with pytest.raises(ZeroDivisionError), handle:
            handle.observer = fails
            model.generate(IDS[:, :9], attention_mask=torch.ones_like(IDS[:, :9]), max_new_tokens=9)

    def test_after_an_exception_halfway_through_attaching(self, model, monkeypatch):
        last = find_layers(model)[-1].module
        monkeypatch.setattr(last, "register_forward_hook", None, raising=False)
        with pytest.raises(TypeError):
            attach(model, "decoupled-nvfp4")
        monkeypatch.undo()
        attach(model, "decoupled-nvfp4").detach()

    def test_detach_is_idempotent(self, model):
        handle = attach(model, "decoupled-nvfp4")
        handle.detach()
        with attach(model, "replay-fp32"):
            handle.detach()
            _, cache = run(model, IDS)
            assert not states(cache)

    def test_one_of_two_models_goes_first(self, model):
        other = copy.deepcopy(model)
        first, second = attach(model, "coupled-nvfp4"), attach(other, "replay-fp32")
        first.detach()
        assert not states(run(other, IDS)[1]) and states(run(model, IDS)[1])
        second.detach()


class TestCaches:
    def test_made_inside_and_used_outside(self, model):
        cuts = IDS[:, :9], *steps(IDS[:, 9:20])
        expected, _ = run(model, *cuts, *steps(IDS[:, 20:]))
        with attach(model, "replay-fp32"):
            first, cache = run(model, *cuts)
        rest, cache = run(model, *steps(IDS[:, 20:]), cache=cache)
        close(torch.cat([first, rest], dim=1), expected)

    def test_made_outside_and_used_inside(self, model):
        cuts = IDS[:, :9], *steps(IDS[:, 9:20])
        expected, _ = run(model, *cuts, *steps(IDS[:, 20:]))
        first, cache = run(model, *cuts)
        with attach(model, "replay-fp32") as handle:
            rest, cache = run(model, *steps(IDS[:, 20:]), cache=cache)
            assert len(handle.states(cache)) == len(handle.layers)
        close(torch.cat([first, rest], dim=1), expected)

    def test_made_outside_and_continued_with_several_tokens(self, model):
        expected, _ = run(model, IDS)
        first, cache = run(model, IDS[:, :30])
        with attach(model, "replay-fp32"):
            rest, _ = run(model, IDS[:, 30:], cache=cache)
        close(torch.cat([first, rest], dim=1), expected)

    def test_are_not_kept_alive(self, model):
        with attach(model, "replay-fp32") as handle:
            _, cache = run(model, IDS[:, :9], *steps(IDS[:, 9:12]))
            assert handle.state_bytes()["total"] > 0
            watch = weakref.ref(cache)
            del cache
            gc.collect()
            assert watch() is None and handle.state_bytes()["total"] == 0

    def test_a_reset_cache_is_like_a_new_one(self, model):
        """Of the first layer, whose inputs are the embeddings; attention layers have their own way to be reset."""
        with attach(model, "decoupled-nvfp4") as handle:
            first, cuts = handle.layers[0].name, (IDS[:, :9], *steps(IDS[:, 9:30]))
            expected = handle.states(run(model, *cuts)[1])[first]
            _, cache = run(model, tokens(2, 30, seed=7))
            cache.reset()
            assert not handle.states(cache)[first].checkpoint.decode().any()
            got = handle.states(run(model, *cuts, cache=cache)[1])[first]
            assert torch.equal(folded(got), folded(expected)) and torch.equal(got.cursor, expected.cursor)

    def test_a_copied_cache_goes_on_by_itself(self, model):
        with attach(model, "decoupled-nvfp4"):
            _, cache = run(model, IDS[:, :9], *steps(IDS[:, 9:14]))
            twin = copy.deepcopy(cache)
            expected, _ = run(model, *steps(IDS[:, 14:40]), cache=cache)
            got, _ = run(model, *steps(IDS[:, 14:40]), cache=twin)
            assert torch.equal(got, expected)

    def test_a_copied_cache_survives_the_context(self, model):
        with attach(model, "replay-fp32"):
            _, cache = run(model, IDS[:, :9], *steps(IDS[:, 9:14]))
            unused = copy.deepcopy(cache)
        expected, _ = run(model, *steps(IDS[:, 14:20]), cache=cache)
        got, _ = run(model, *steps(IDS[:, 14:20]), cache=unused)
        assert torch.equal(got, expected)

    def test_a_pickled_cache_carries_tensors(self, model):
        with attach(model, "replay-fp32"):
            _, cache = run(model, IDS[:, :9], *steps(IDS[:, 9:14]))
            loaded = pickle.loads(pickle.dumps(cache))
            assert states(loaded).keys() == {layer.module.layer_idx for layer in find_layers(model)}
            expected, _ = run(model, *steps(IDS[:, 14:20]), cache=cache)
            got, _ = run(model, *steps(IDS[:, 14:20]), cache=loaded)
        close(got, expected)

    def test_with_another_model_that_is_not_attached(self, model):
        with attach(model, "replay-fp32"):
            _, cache = run(model, IDS[:, :9])
            with pytest.raises(QuantizeStateError, match="not attached"):
                run(build_like(model), *steps(IDS[:, 9:10]), cache=cache)


def build_like(model):
    return type(model)(model.config).eval()


class TestCachedState:
    @pytest.fixture
    def cached(self):
        model = build("qwen3_next")
        with attach(model, "decoupled-nvfp4") as handle:
            _, cache = run(model, IDS[:, :9], *steps(IDS[:, 9:14]))
            yield cache.layers[0].recurrent_states[0]
            handle.detach()

    def test_looks_like_the_tensor_that_it_stands_for(self, cached):
        tensor = cached.tensor()
        assert cached.shape == tensor.shape == (2, 4, 32, 24) and cached.size(1) == 4
        assert (cached.dtype, cached.device) == (tensor.dtype, tensor.device)
        assert "decoupled-nvfp4" in repr(cached)

    def test_moving_to_where_it_is_or_to_another_dtype_changes_nothing(self, cached):
        for moved in (cached.to("cpu", non_blocking=True), cached.to(torch.bfloat16), cached.to(torch.zeros(1))):
            assert moved is cached
        assert cached.to(device="meta").device.type == "meta"

    def test_rows(self, cached):
        tensor = cached.tensor()
        assert torch.equal(cached.index_select(0, torch.tensor([1, 0, 1])).tensor(), tensor[[1, 0, 1]])
        assert torch.equal(cached.repeat_interleave(2, dim=0).tensor(), tensor.repeat_interleave(2, dim=0))
        assert torch.equal(cached[torch.tensor([1])].tensor(), tensor[[1]])
        assert torch.equal(cached[:1].tensor(), tensor[:1])
        with pytest.raises(QuantizeStateError, match="dimension 1"):
            cached.index_select(1, torch.tensor([0]))

    def test_copying(self, cached):
        before = cached.tensor()
        assert cached.copy_(cached) is cached and torch.equal(cached.tensor(), before)
        twin = copy.deepcopy(cached)
        twin.zero_()
        assert not twin.tensor().any() and torch.equal(cached.tensor(), before)
        twin.copy_(before)
        assert torch.equal(twin.tensor(), before)
        assert torch.equal(twin.zero_().copy_(cached).tensor(), before)


class TestPolicies:
    def test_a_recipe_gives_each_layer_its_own(self, model):
        names = [layer.name for layer in find_layers(model)]
        recipe = Recipe(parse_arm("replay-fp32"), {names[1]: parse_arm("decoupled-nvfp4-w8")})
        with attach(model, recipe) as handle:
            _, cache = run(model, IDS)
            held = handle.states(cache)
        assert {name: state.policy.name for name, state in held.items()} == {
            name: "decoupled-nvfp4-w8" if name == names[1] else "replay-fp32" for name in names
        }
        assert [layer.index for layer in handle.layers] == list(range(len(names)))

    def test_a_recipe_for_layers_that_the_model_lacks(self, model):
        recipe = Recipe(layers={"model.layers.99.*": StatePolicy(), "0": StatePolicy()})
        with pytest.raises(InvalidValueError, match=r"model\.layers\.99\.\*") as error:
            attach(model, recipe)
        assert all(layer.name in str(error.value) for layer in find_layers(model))

    @pytest.mark.parametrize("policy", ["decoupled-nvfp5", {"default": "replay-fp32", "layer": {}}, 7])
    def test_what_is_no_policy(self, model, policy):
        with pytest.raises(InvalidValueError):
            attach(model, policy)

    def test_new_states_follow_a_changed_policy_and_old_ones_do_not(self, model):
        with attach(model, "replay-fp32") as handle:
            _, old = run(model, IDS[:, :9])
            handle.use("decoupled-fp8")
            _, new = run(model, IDS[:, :9])
            run(model, *steps(IDS[:, 9:12]), cache=old)
            assert {s.policy.name for s in handle.states(old).values()} == {"replay-fp32"}
            assert {s.policy.name for s in handle.states(new).values()} == {"decoupled-fp8_e4m3"}
            assert {p.name for p in handle.policies.values()} == {"decoupled-fp8_e4m3"}

    def test_none_is_transformers_own(self, model):
        cuts = IDS[:, :9], *steps(IDS[:, 9:30])
        expected, untouched = run(model, *cuts)
        with attach(model, None) as handle:
            got, cache = run(model, *cuts)
            assert not handle.states(cache)
        assert torch.equal(got, expected)
        assert all(torch.equal(a, b) for a, b in zip(states(cache).values(), states(untouched).values(), strict=True))

    def test_bytes(self, model):
        with attach(model, "decoupled-nvfp4") as handle:
            _, cache = run(model, IDS[:, :9])
            parts = handle.state_bytes()
            held = handle.states(cache)
            assert {name: sizes["total"] for name, sizes in parts["layers"].items()} == {
                name: state.state_bytes()["total"] for name, state in held.items()
            }
            elements = sum(2 * state.spec.elements for state in held.values())
            assert parts["checkpoint"] == 4 * elements
            assert parts["copy"] / elements == pytest.approx(0.5625, rel=0.02)
            assert parts["total"] == parts["checkpoint"] + parts["copy"] + parts["ring"]

    def test_two_models_of_one_class(self, model):
        other, third = copy.deepcopy(model), copy.deepcopy(model)
        cuts = IDS[:, :9], *steps(IDS[:, 9:40])
        expected = []
        for policy in ("coupled-nvfp4", "decoupled-nvfp4"):
            with attach(model, policy):
                expected.append(run(model, *cuts)[0])
        with attach(model, "coupled-nvfp4"), attach(other, "decoupled-nvfp4"):
            caches, logits = [None] * 3, [[], [], []]
            for ids in cuts:  # turn by turn
                for i, each in enumerate((model, other, third)):
                    y, caches[i] = run(each, ids, cache=caches[i])
                    logits[i].append(y)
        assert torch.equal(torch.cat(logits[0], dim=1), expected[0])
        assert torch.equal(torch.cat(logits[1], dim=1), expected[1])
        assert torch.equal(torch.cat(logits[2], dim=1), run(model, *cuts)[0])

    def test_attached_twice(self, model):
        with attach(model, "replay-fp32"):
            with pytest.raises(QuantizeStateError, match="attached already"):
                attach(model, "replay-fp32")
            expected, _ = run(model, IDS)
        with attach(model, "replay-fp32"):
            assert torch.equal(run(model, IDS)[0], expected)


class TestTeacherForcing:
    """A chunk with the arithmetic of decode, against as many steps.

    The layers' inputs are recorded in the chunk and stepped again, because within a whole model rounding is not
    continuous: where two layer inputs differ in their last bit, one code in a million may fall to the other side.
    """

    ARMS = ("decoupled-nvfp4", "coupled-nvfp4", "replay-fp32")

    @pytest.mark.parametrize("name", TINY_MODELS)
    @pytest.mark.parametrize("arm", ARMS)
    def test_is_what_steps_give(self, name, arm):
        """With a cache or without in turn, so that each model and each arm meets both."""
        with_cache = (TINY_MODELS.index(name) + self.ARMS.index(arm)) % 2 == 0
        model, policy, seen = build(name), parse_arm(arm), []
        with attach(model, policy, teacher_forced=True) as handle, torch.no_grad():
            handle.observer = lambda layer, inputs, y, state: seen.append((layer, inputs, y, state))
            output = model(IDS[:, :40], use_cache=with_cache)
            if with_cache:
                assert all(held is seen[i][3] for i, held in enumerate(handle.states(cache_of(output)).values()))
        assert [layer for layer, *_ in seen] == list(handle.layers)
        for layer, inputs, y, state in seen:
            stepped = DecodeState.allocate(
                state.spec, policy, 2, layer=layer.name, decay_rate=state.decay_rate, dtype=inputs.v.dtype
            )
            again = torch.cat([step(stepped, inputs.slice(t, t + 1)) for t in range(inputs.tokens)], dim=1)
            close(y, again)
            close(state.checkpoint.decode(), stepped.checkpoint.decode())
            assert torch.equal(state.cursor, stepped.cursor) and torch.equal(state.position, stepped.position)

    @pytest.mark.parametrize("name", TINY_MODELS)
    def test_of_a_whole_model_in_chunks_and_steps(self, name):
        """An exact policy, so that nothing is rounded: one chunk, or a first token and then steps of every kind."""
        model, ids = build(name), IDS[:, :40]
        with attach(model, "replay-fp32", teacher_forced=True) as handle:
            expected, whole = run(model, ids)
            pieces, cache = run(model, *ids[:, :20].split([1, 4, 13, 2], dim=1))
            handle.teacher_forced = False
            rest, cache = run(model, *steps(ids[:, 20:]), cache=cache)
            for state, other in zip(handle.states(whole).values(), handle.states(cache).values(), strict=True):
                close(state.checkpoint.decode(), other.checkpoint.decode())
                assert torch.equal(state.cursor, other.cursor)
        close(torch.cat([pieces, rest], dim=1), expected)

    def test_observed_states_are_scanned(self, model):
        """The observer sees raw inputs: scanning them anew gives the outputs that it was shown."""
        seen = []
        with attach(model, "decoupled-nvfp4", teacher_forced=True) as handle, torch.no_grad():
            handle.observer = lambda layer, inputs, y, state: seen.append((inputs, y, state))
            model(IDS, use_cache=False)
        for inputs, y, state in seen:
            fresh = DecodeState.allocate(state.spec, state.policy, 2, layer=state.layer, decay_rate=state.decay_rate)
            assert torch.equal(scan(fresh, inputs), y)


class TestUnsupported:
    def test_names_the_layers_and_what_is_supported(self):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* LlamaAttention.* qwen3_next") as error:
            attach(transformers.LlamaForCausalLM(config), "replay-fp32")
        assert "nemotron_h" in str(error.value) and "\n" not in str(error.value)

    def test_a_recurrence_of_another_kind(self):
        config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
        with pytest.raises(UnsupportedModelError, match="MambaMixer"):
            attach(transformers.MambaForCausalLM(config), "replay-fp32")

    def test_other_layers_are_named(self):
        with attach(build("qwen3_next"), "replay-fp32") as handle:
            assert handle.others == {"Qwen3NextAttention": 1}
            assert "Qwen3NextAttention" in repr(handle)

    def test_a_layer_whose_forward_is_another(self, model):
        """Such as a hub kernel for the whole layer: the state would stay empty."""
        layer = find_layers(model)[0].module
        with attach(model, "replay-fp32"):
            layer.forward = lambda hidden_states, **_: hidden_states
            with pytest.raises(QuantizeStateError, match="without its recurrence being called"):
                run(model, IDS)
            del layer.forward
            run(model, IDS)

    def test_packed_sequences(self):
        model = build("qwen3_next")
        with attach(model, "replay-fp32"), pytest.raises(QuantizeStateError, match="packed"):
            model(IDS[:1], use_cache=False, cu_seq_lens_q=torch.tensor([0, 30, 60]))


class TestCopies:
    def test_a_deep_copy_is_not_attached(self, model):
        expected, _ = run(model, IDS)
        with attach(model, "coupled-nvfp4"):
            twin = copy.deepcopy(model)
            assert torch.equal(run(twin, IDS)[0], expected)
            with attach(twin, "replay-fp32") as handle:
                assert len(handle.states(run(twin, IDS)[1])) == len(handle.layers)
        assert torch.equal(run(twin, IDS)[0], expected)

    def test_a_pickled_model_is_not_attached(self, model):
        expected, _ = run(model, IDS)
        with attach(model, "coupled-nvfp4"):
            twin = pickle.loads(pickle.dumps(model))
            assert torch.equal(run(twin, IDS)[0], expected)


def test_threads(model):
    """Two threads, each with its own attached model, and one with a model that is not."""
    arms = ["coupled-nvfp4", "decoupled-nvfp4", None]
    models = [copy.deepcopy(model) for _ in arms]
    cuts = IDS[:, :9], *steps(IDS[:, 9:26])
    expected = []
    for each, arm in zip(models, arms, strict=True):
        handle = attach(each, arm)
        expected.append(run(each, *cuts)[0])
        handle.detach()
    got, start = [None] * len(arms), threading.Barrier(len(arms))

    def work(i):
        start.wait()
        for _ in range(2):
            if arms[i] is None:
                got[i] = run(models[i], *cuts)[0]
            else:
                with attach(models[i], arms[i]):
                    got[i] = run(models[i], *cuts)[0]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arms))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_gradients_do_not_pass(model):
    """A forward pass works with gradients enabled, and a backward pass says why it can't."""
    with attach(model, "replay-fp32"):
        logits = model(IDS[:, :9], use_cache=False).logits
        with pytest.raises(QuantizeStateError, match="inference"):
            logits.sum().backward()
    close(logits.detach(), model(IDS[:, :9], use_cache=False).logits.detach())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_dtypes_and_shapes_are_those_of_the_functions_replaced(name, monkeypatch):
    """In bfloat16, where they differ: what each function gives, in chunks and steps."""
    model = build(name).to(torch.bfloat16)
    given = []

    def record(function):
        def recorded(*args, **kwargs):
            output = function(*args, **kwargs)
            parts = output if isinstance(output, tuple) else (output,)
            given.append([None if part is None else (tuple(part.shape), part.dtype) for part in parts])
            return output

        return recorded

    def recorded_run():
        given.clear()
        for layer in {id(layer.namespace): layer for layer in find_layers(model)}.values():
            for function in layer.family.functions:
                if function in layer.namespace:
                    monkeypatch.setitem(layer.namespace, function, record(layer.namespace[function]))
        run(model, IDS[:, :9], *steps(IDS[:, 9:11]))
        with torch.no_grad():
            model(IDS[:, :9], use_cache=False)
        monkeypatch.undo()
        return list(given)

    expected = recorded_run()
    with attach(model, "decoupled-nvfp4"):
        got = recorded_run()
    assert got == expected and len(got) == 4 * len(find_layers(model))


def test_compiled_model():
    """torch.compile breaks its graph at the states, and what it compiled before is not used."""
    model = build("mamba2")
    expected, _ = run(model, IDS[:, :9])
    compiled = torch.compile(model, backend="eager")
    compiled(IDS[:, :9])
    with attach(compiled, "replay-fp32") as handle, torch.no_grad():
        assert [layer.name for layer in handle.layers] == [layer.name for layer in find_layers(model)]
        output = compiled(IDS[:, :9], use_cache=True)
        assert len(handle.states(cache_of(output))) == len(handle.layers)
    close(output.logits, expected)


def test_the_name_of_the_cache(model):
    name = cache_argument(model)
    with torch.no_grad():
        output = model(IDS[:, :9], use_cache=True)
    assert isinstance(output[name], transformers.Cache)


def test_a_cached_state_is_what_travels(model):
    with attach(model, "replay-fp32"):
        _, cache = run(model, IDS)
        held = [cache.layers[layer.module.layer_idx].recurrent_states[0] for layer in find_layers(model)]
        assert all(isinstance(state, CachedState) for state in held)


@pytest.mark.parametrize("name", [name for name in ("nemotron_h", "zamba2", "qwen3_next") if name in TINY_MODELS])
def test_under_teacher_forcing_the_untouched_model_has_no_limits_on_delta(name):
    """It is the noise floor of an evaluation, and decode, which is evaluated, has none."""
    model = build(name)
    with attach(model, "reference", teacher_forced=True) as handle:
        expected, expected_cache = run(model, IDS)
        expected_states = {i: state.tensor() for i, state in states_of(expected_cache).items()}
        handle.use(None)
        forced, cache = run(model, IDS)
    close(forced, expected)
    for layer, state in expected_states.items():
        close(states(cache)[layer], state)
    prompt, _ = run(model, IDS)
    limited = name != "qwen3_next"
    assert bool((forced - prompt).norm() / prompt.norm() > 1e-3) == limited


def states_of(cache):
    """The CachedStates that a cache holds, by layer number."""
    held = {i: getattr(layer, "recurrent_states", None) for i, layer in enumerate(cache.layers)}
    return {i: s[0] for i, s in held.items() if s is not None and isinstance(s[0], CachedState)}
