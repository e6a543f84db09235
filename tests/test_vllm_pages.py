"""The vLLM plugin without vLLM: states in pages of a pool, what happens around prefill, which policy a layer has."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from recurrence import SPECS, random_inputs
from vllm_pages import Scheduler, all_outputs, exact_outputs, layer, pool, requests_of

from quantize_state.integrations.vllm import gates, serving
from quantize_state.integrations.vllm.checks import check_config, names
from quantize_state.integrations.vllm.layer import ReadCopy, running
from quantize_state.integrations.vllm.pages import ALIGNMENT, extra_shapes, parts, state_in_pages
from quantize_state.kernels.step import folded, step
from quantize_state.quant.errors import InvalidValueError, NonFiniteStateError, QuantizeStateError
from quantize_state.quant.model_recipe import ModelRecipe
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.recipe import Recipe
from quantize_state.quant.state import DecodeState

EXACT = 1e-6
"""Relative error of an FP32 copy's outputs against float64: FP32 sums over some flushes; measured up to 1.2e-7."""

LENGTHS = [(5, 24), (1, 19), (3, 22), (8, 20), (2, 23), (6, 17), (4, 21), (9, 22), (5, 18)]
"""Tokens of the prompt and in all, of each request."""

EVENTS = {"reused", "mixed", "folded", "last chunks", "decoded", "padded", "preempted", "shared"}

ARMS = ["replay-fp32", "decoupled-nvfp4", "decoupled-fp8-w5", "decoupled-fp32-w4", "decoupled-bf16-nvfp4-w8"]


def enter(copy, slots, states, has_state=None):
    """What vLLM's prefill does, seen from here: it leaves ``states`` in the checkpoints of ``slots``."""
    slots = torch.tensor(slots)
    with copy.prefill(slots, None if has_state is None else torch.tensor(has_state)):
        seen = copy.state.checkpoint[slots].decode()
        copy.state.checkpoint.codes[slots] = states.to(copy.state.checkpoint.codes.dtype)
    return seen


def decode(copy, inputs, slots, **given):
    out = torch.full((inputs.rows, copy.spec.heads, copy.spec.value_dim), float("nan"))
    copy.decode(inputs, torch.tensor(slots, dtype=torch.int32), out, **given)
    return out


def start(spec, rows, seed=1):
    return torch.randn(rows, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(seed))


def plain(family, arm, states):
    """The same state in tensors of its own."""
    spec, rate = SPECS[family]
    state = DecodeState.allocate(spec, parse_arm(arm), len(states), decay_rate=rate)
    state.renew_(states)
    return state


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("padding", [0, 8, 1000])
def test_a_state_in_pages_is_bit_for_bit_a_state(family, arm, padding):
    copy, pages = layer(family, arm, padding=padding)
    states, slots = start(copy.spec, 2), [5, 2]
    untouched = pages[[0, 1, 3, 4, 6]].clone()
    enter(copy, slots, states)
    other = plain(family, arm, states)
    inputs = random_inputs(copy.spec, 2, 2 * copy.policy.window + 3, seed=2, dtype=torch.float32)
    for t in range(inputs.tokens):
        token = inputs.slice(t, t + 1)
        assert torch.equal(decode(copy, token, slots), step(other, token)[:, 0])
    assert torch.equal(folded(copy.state, torch.tensor(slots)), folded(other))
    assert torch.equal(pages[[0, 1, 3, 4, 6]], untouched), "a step wrote into pages of other requests"


@pytest.mark.parametrize("family", SPECS)
def test_parts_do_not_overlap(family):
    spec = SPECS[family][0]
    policies = [parse_arm(arm) for arm in ARMS]
    size = extra_shapes(spec, policies)[2][0]
    for policy in policies:
        end = 0
        for part in parts(spec, policy):
            assert part.offset >= end and part.offset % ALIGNMENT == 0
            end = part.offset + part.nbytes
        assert end + ALIGNMENT <= size
    assert extra_shapes(spec, policies)[0] == (16, spec.heads, spec.value_dim)


@pytest.mark.parametrize("arm", ["decoupled-fp8-w5", "decoupled-nvfp4-w32"])
def test_layers_of_several_policies_share_one_layout(arm):
    copy, _ = layer("gdn", arm, policies=[parse_arm(a) for a in ("decoupled-fp8-w5", "decoupled-nvfp4-w32")])
    states = start(copy.spec, 1)
    enter(copy, [3], states)
    other = plain("gdn", arm, states)
    for t in range(40):
        token = random_inputs(copy.spec, 1, 1, seed=t, dtype=torch.float32)
        assert torch.equal(decode(copy, token, [3]), step(other, token)[:, 0])


@pytest.mark.parametrize("convolution", [24, 26])
def test_parts_are_aligned_where_pages_allow_it(convolution):
    copy, _ = layer("mamba2", "decoupled-nvfp4", convolution=convolution, padding=-4 * convolution % 16)
    codes = copy.state.copy.codes
    assert codes.data_ptr() % ALIGNMENT == 0 and codes.stride(0) % ALIGNMENT == 0


def test_pages_of_an_odd_size_are_refused():
    with pytest.raises(QuantizeStateError, match="no multiple of 8"):
        layer("mamba2", "decoupled-nvfp4", padding=4)


@pytest.mark.parametrize("family", SPECS)
def test_padded_rows_change_nothing(family):
    """vLLM pads a batch with page 0, several times."""
    copy, pages = layer(family, "decoupled-nvfp4")
    states = start(copy.spec, 1)
    enter(copy, [4], states)
    other = plain(family, "decoupled-nvfp4", states)
    before = pages[0].clone()
    for t in range(18):
        inputs = random_inputs(copy.spec, 3, 1, seed=t, dtype=torch.float32)
        out = decode(copy, inputs, [0, 4, 0])
        assert torch.equal(out[1:2], step(other, inputs.rows_at(torch.tensor([1])))[:, 0])
        assert (out[[0, 2]] == 0).all()
    assert torch.equal(pages[0], before)


@pytest.mark.parametrize("arm", ["replay-fp32", "decoupled-nvfp4", "decoupled-bf16-nvfp4"])
def test_prefill_sees_the_ring_and_leaves_it_empty(arm):
    copy, _ = layer("gdn", arm)
    enter(copy, [1, 2], start(copy.spec, 2))
    for t in range(5):
        decode(copy, random_inputs(copy.spec, 2, 1, seed=t, dtype=torch.float32), [1, 2])
    whole, kept = (folded(copy.state, torch.tensor([page])) for page in (1, 2))
    states = start(copy.spec, 2, seed=9)
    # Page 3 is new, and what lies in it looks like a ring; page 1 goes on.
    copy.state.cursor[3] = 7
    seen = enter(copy, [3, 1], states, has_state=[False, True])
    exact = copy.policy.checkpoint == "fp32"
    assert torch.equal(seen[1], whole[0] if exact else whole[0].bfloat16().float())
    assert copy.state.cursor[[1, 2, 3]].tolist() == [0, 5, 0]
    assert torch.equal(folded(copy.state, torch.tensor([2])), kept), "a page that was not prefilled has changed"
    fresh = plain("gdn", arm, states[[1, 0]])
    for t in range(20):
        token = random_inputs(copy.spec, 2, 1, seed=t + 50, dtype=torch.float32)
        assert torch.equal(decode(copy, token, [1, 3]), step(fresh, token)[:, 0])


def test_a_state_left_inside_of_a_prompt_gets_its_copy_too():
    copy, _ = layer("mamba2", "decoupled-nvfp4")
    states = start(copy.spec, 2)
    with copy.prefill(torch.tensor([1]), None, torch.tensor([6])):
        copy.state.checkpoint.codes[[1, 6]] = states
    other = plain("mamba2", "decoupled-nvfp4", states)
    token = random_inputs(copy.spec, 2, 1, seed=3, dtype=torch.float32)
    assert torch.equal(decode(copy, token, [1, 6]), step(other, token)[:, 0])


@pytest.mark.parametrize("family", SPECS)
def test_a_copied_page_is_the_whole_state(family):
    """Prefix caching copies pages between blocks, whatever the ring holds."""
    copy, pages = layer(family, "decoupled-fp8")
    enter(copy, [1], start(copy.spec, 1))
    for t in range(7):
        decode(copy, random_inputs(copy.spec, 1, 1, seed=t, dtype=torch.float32), [1])
    pages[5] = pages[1]
    for t in range(20):
        token = random_inputs(copy.spec, 1, 1, seed=t + 9, dtype=torch.float32)
        assert torch.equal(decode(copy, token, [1]), decode(copy, token, [5]))


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_a_pool_that_keeps_states_transposed(family):
    """As vLLM does on a CPU; V ≠ K here, so that a wrong transpose can't hide."""
    copy, pages = layer(family, "decoupled-nvfp4", transposed=True)
    states = start(copy.spec, 1)
    enter(copy, [2], states)
    size = states[0].numel() * 4
    assert torch.equal(pages[2, 96 : 96 + size].view(torch.float32), states[0].mT.flatten())
    other = plain(family, "decoupled-nvfp4", states)
    for t in range(20):
        token = random_inputs(copy.spec, 1, 1, seed=t, dtype=torch.float32)
        assert torch.equal(decode(copy, token, [2]), step(other, token)[:, 0])


@pytest.mark.parametrize("family", SPECS)
def test_requests_are_served_exactly_whatever_the_scheduler_does(family):
    """Chunks, chunks of one token, mixed and padded batches, preemption, pages that are used again or shared."""
    seen = Counter()
    for seed in range(6):
        copy, pages = layer(family, "decoupled-fp32-w4")
        unused = pages[0].clone()
        scheduler = Scheduler(copy, pages, requests_of(copy.spec, LENGTHS), seed=seed)
        done = scheduler.serve()
        expected = exact_outputs(copy, done)
        assert (all_outputs(done) - expected).norm() < EXACT * expected.norm()
        assert torch.equal(pages[0], unused), "the null page was written"
        seen += scheduler.seen
    assert set(seen) == EVENTS, "not all that this test is about has happened"


@pytest.mark.parametrize("family", SPECS)
def test_isolation(family):
    """Whatever the copy holds, the checkpoint is the same to the bit."""
    checkpoints = []
    for garbage in (False, True):
        copy, _ = layer(family, "decoupled-nvfp4-w5")
        enter(copy, [3], start(copy.spec, 1))
        for t in range(23):
            if garbage:
                copy.state.copy.codes[3].random_(generator=torch.Generator().manual_seed(t))
            decode(copy, random_inputs(copy.spec, 1, 1, seed=t, dtype=torch.float32), [3])
        checkpoints.append(copy.state.checkpoint.codes[3].clone())
    assert torch.equal(*checkpoints)


def test_what_the_kernels_lack_is_refused_on_a_gpu():
    copy, _ = layer("mamba2", "decoupled-bf16-nvfp4")
    with pytest.raises(QuantizeStateError, match="FP32 checkpoint"):
        copy.use_kernels()


def test_a_state_that_overflowed_names_layer_slot_and_head():
    copy, _ = layer("mamba2", "decoupled-nvfp4")
    states = start(copy.spec, 1)
    states[0, 2] = float("inf")
    with pytest.raises(NonFiniteStateError, match=r"model\.layers\.0\.mixer.*slot 4.*head 2"):
        enter(copy, [4], states)


def test_the_running_layer_is_known_inside_alone():
    outer, _ = layer("mamba2", "replay-fp32")
    inner, _ = layer("gdn", "replay-fp32")
    empty = torch.empty(0)
    with outer.prefill(empty, None):
        assert running.layer is outer
        with pytest.raises(RuntimeError), inner.prefill(empty, None):
            assert running.layer is inner
            raise RuntimeError
        assert running.layer is outer
    assert running.layer is None


def test_a_layer_without_pages_says_so():
    copy = ReadCopy("layers.1", SPECS["gdn"][0], StatePolicy(), 4)
    with pytest.raises(QuantizeStateError, match=r"layers\.1.*pages"):
        _ = copy.state


def test_decay_rates_stay_those_of_the_layer():
    """Weights that are loaded again into the same tensor count at once."""
    spec, rate = SPECS["mamba2"]
    _, views = pool(spec, [StatePolicy()])
    rate = rate.clone()
    state = state_in_pages(spec, StatePolicy(), "x", checkpoint=views[1], extra=views[2:], decay_rate=rate)
    assert state.decay_rate.data_ptr() == rate.data_ptr()


# --- what is refused --------------------------------------------------------------------------------------------------


def config(**changed):
    """An engine's configuration, as far as it is looked at."""
    plain = {
        "use_replayssm": False,
        "kv_offloading_size": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "enable_stochastic_rounding": False,
        "pipeline_parallel_size": 1,
    } | changed
    given = SimpleNamespace(**plain)
    given.cache_config = given.mamba_config = given.parallel_config = given
    return given


@pytest.mark.parametrize(
    ("changed", "layers", "message"),
    [
        ({"use_replayssm": True}, {}, "--use-replayssm keeps a ring of its own"),
        ({"speculative_config": object()}, {}, "speculative decoding"),
        ({"kv_transfer_config": SimpleNamespace(is_kv_transfer_instance=True)}, {}, "KV connector"),
        ({"kv_offloading_size": 4.0}, {}, "KV connector, which --kv-offloading-size is too"),
        ({"enable_stochastic_rounding": True}, {}, "stochastic rounding"),
        ({"pipeline_parallel_size": 2}, {"3": "decoupled-fp8"}, "with pipeline parallelism, name them"),
    ],
)
def test_what_a_read_copy_can_not_be_kept_under(changed, layers, message):
    recipe = Recipe.from_dict({"default": "decoupled-nvfp4", "layers": layers})
    plugin = SimpleNamespace(asked="mine.yaml", recipe=recipe)
    with pytest.raises(QuantizeStateError, match=f"QUANTIZE_STATE_POLICY=mine.yaml.*{message}.*unset the variable"):
        check_config(config(**changed), plugin)
    named = Recipe.from_dict({"default": "decoupled-nvfp4", "layers": {"*layers.3.*": "decoupled-fp8"}})
    check_config(config(pipeline_parallel_size=2), SimpleNamespace(asked="mine.yaml", recipe=named))
    check_config(config(kv_transfer_config=SimpleNamespace(is_kv_transfer_instance=False)), plugin)


# --- gates ------------------------------------------------------------------------------------------------------------


def test_gates_are_those_of_transformers():
    rng = torch.Generator().manual_seed(0)
    rows, heads, dim = 3, 4, 8
    a, b, A_log, bias = (torch.randn(s, generator=rng) for s in ((rows, heads), (rows, heads), heads, heads))
    q = torch.zeros(rows, heads, dim)
    gdn = gates.gdn_inputs(q, q, q, a, b, A_log, bias)
    expected = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + bias)
    assert torch.equal(gdn.g[:, 0], expected) and torch.equal(gdn.beta[:, 0], b.sigmoid())

    mamba2 = gates.mamba2_inputs(q, a, q, q, bias)
    assert torch.equal(mamba2.beta[:, 0], torch.nn.functional.softplus(a + bias)) and mamba2.g is None

    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

    gate = KimiLinearForgetGate(
        type("C", (), {"linear_head_dim": dim, "linear_num_heads": heads, "hidden_size": 16})()
    ).requires_grad_(False)
    with torch.no_grad():
        gate.dt_bias.normal_(generator=rng)
        gate.A_log.normal_(generator=rng)
        hidden = torch.randn(1, rows, 16, generator=rng)
        raw_g = gate.f_b_proj(gate.f_a_proj(hidden)).view(rows, heads, dim)
        kda = gates.kda_inputs(q, q, q, raw_g, b, gate.A_log.flatten(), gate.dt_bias)
        torch.testing.assert_close(kda.g[:, 0], gate(hidden)[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(kda.beta[:, 0], b.sigmoid())
    safe = gates.kda_inputs(q, q, q, raw_g, b, A_log, gate.dt_bias, lower_bound=-5.0).g
    assert safe.min() >= -5.0 and safe.max() <= 0.0
    biased = raw_g[1, 2, 3] + gate.dt_bias.view(heads, dim)[2, 3]
    assert torch.isclose(safe[1, 0, 2, 3], -5.0 * torch.sigmoid(A_log[2].exp() * biased))


# --- which policy a layer has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("decoupled-nvfp3", "unknown format"),
        ("coupled-nvfp4", "must be fp32, bf16 or fp16"),
        ("coupled-bf16-sr", "stochastic"),
        ("no-such-file.yaml", "can't read the recipe"),
    ],
)
def test_policies_that_cannot_be_served(asked, message):
    with pytest.raises(QuantizeStateError, match=message):
        serving.read_recipe(asked)


def test_checkpoints_of_one_format():
    recipe = Recipe.from_dict({"default": "decoupled-nvfp4", "layers": {"0": "decoupled-bf16-nvfp4"}})
    with pytest.raises(InvalidValueError, match="several formats"):
        serving.check_servable(recipe, "mine.yaml")


def test_recipes_from_files_and_model_directories(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\ndefault: decoupled-fp8\n")
    assert serving.read_recipe(str(file)).default.read == "fp8_e4m3"
    with pytest.raises(InvalidValueError, match=r"no state_quant_config\.json"):
        serving.recipe_of_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    ModelRecipe(Recipe.from_yaml(file), {}).write(tmp_path)
    assert serving.recipe_of_model(str(tmp_path)).default.read == "fp8_e4m3"


def test_patterns_reach_layers_under_either_name():
    given = {"0": "reference", "model.layers.1?.*": "decoupled-fp8", "*.layers.12.mixer": "replay-fp32"}
    recipe = Recipe.from_dict({"default": "decoupled-nvfp4", "layers": given})
    prefixes = [f"language_model.model.layers.{i}.mixer" for i in (3, 5, 10, 12)]
    found = [serving.policy_of(recipe, prefix, i).name for i, prefix in enumerate(prefixes)]
    assert found == ["reference", "decoupled-nvfp4", "decoupled-fp8_e4m3", "replay-fp32"]
    serving.check_patterns(recipe, prefixes)
    with pytest.raises(InvalidValueError, match=r"'\*\.layers\.12\.mixer' of the recipe.*layers\.10"):
        serving.check_patterns(recipe, prefixes[:-1])
    assert [serving.untouched(p) for p in serving.policies_of(recipe)] == [False, True, False, False]


def test_names_are_short():
    layers = [type("L", (), {"prefix": f"model.layers.{i}.mixer"})() for i in (0, 2, 5)]
    assert names(layers) == "model.layers.{0,2,5}.mixer"
    assert names(layers[:1]) == "model.layers.0.mixer"


def test_nothing_happens_without_a_policy(monkeypatch):
    from quantize_state.integrations.vllm import VARIABLE, register

    monkeypatch.setattr("quantize_state.integrations.vllm.plugin.activate", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    monkeypatch.setenv(VARIABLE, " ")
    register()
    monkeypatch.setenv(VARIABLE, "decoupled-nvfp4")
    with pytest.raises(TypeError):
        register()
