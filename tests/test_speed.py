"""The bench without a GPU: which rows are timed, the byte model, statistics, results, tables, and what is refused."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantize_state.cli import main
from quantize_state.evals.report import markdown_text
from quantize_state.evals.speed import bench, cases, measure, memory, peers, table, traffic
from quantize_state.evals.speed.plot import speedup_svg
from quantize_state.evals.speed.result import Bandwidth, SpeedResult, Time
from quantize_state.kernels import bandwidth, checks, launch, sequence
from quantize_state.kernels.device.targets import INTERPRET
from quantize_state.kernels.shapes import SHAPES
from quantize_state.kernels.timing import COLD, Sample, cut, schedule, slots_needed, summarise
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import STALE

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
L2 = 60 * 10**6
KILO = {"read": (2**16, 2**17), "copy": (2**16,)}
"""Bandwidth sizes of tests."""

interpreted = pytest.mark.skipif(not INTERPRET, reason="Triton was imported without TRITON_INTERPRET=1")


# Which rows a launch works on


def played(plan, window):
    """Every launch's ring fills as the graph is replayed, and for each group the launches between two uses of it."""
    cursor = [list(row) for row in plan.fills]
    seen = []
    for _ in range(plan.passes):
        for row in cursor:
            seen.append(list(row))
            row[:] = [0 if fill == window - 1 else fill + 1 for fill in row]
    return seen


@pytest.mark.parametrize("window", [2, 3, 16])
@pytest.mark.parametrize("batch", [1, 3, 8, 32, 64, 100, 256, 512])
def test_every_fill_is_timed_equally_often(batch, window):
    for launch_bytes in (batch * 110_000, batch * 590_000):
        slots = slots_needed(batch, launch_bytes, L2)
        plans = {k: schedule(k, batch, window, slots, launch_bytes, L2) for k in ("non-flush", "flush", "mixed")}
        for kind, plan in plans.items():
            fills = Counter(f for row in played(plan, window) for f in row)
            expected = {"non-flush": range(window - 1), "flush": [window - 1], "mixed": range(window)}[kind]
            assert set(fills) == set(expected), kind
            assert len(set(fills.values())) == 1 or kind == "mixed"
            share = fills[window - 1] / sum(fills.values())
            if kind == "mixed":
                assert math.isclose(share, 1 / window, rel_tol=0.1), share
            if kind == "non-flush":
                assert all(len(set(row)) == 1 for row in played(plan, window)), "rows of a launch are alike"
            assert plan.groups * batch <= slots
            assert (plan.groups - 1) * launch_bytes >= COLD * L2, f"{kind}: a slot is used again from a warm cache"
        if batch % window == 0:
            per_launch = [row.count(window - 1) for row in played(plans["mixed"], window)]
            assert set(per_launch) == {batch // window}, "as many rows flush at every step"


def test_the_pool_is_large_and_grows_for_small_states():
    assert slots_needed(256, 256 * 590_000, L2) == 1025
    assert slots_needed(512, 512 * 110_000, L2) == 512 * 6 + 1
    with pytest.raises(InvalidValueError, match="300 slots are 1 groups of 256 rows; 3 are needed"):
        schedule("flush", 256, 16, 300, 256 * 590_000, L2)
    with pytest.raises(InvalidValueError, match="window of 1"):
        schedule("non-flush", 1, 1, 1025, 10**9, L2)


def test_groups_share_no_slot_and_cursors_fit():
    plan = schedule("mixed", 32, 16, 1025, 32 * 590_000, L2)
    groups, cursor = cut(plan, 1025, CPU)
    together = torch.cat(groups)
    assert together.dtype == torch.int32 and len(together.unique()) == plan.groups * 32
    assert not torch.equal(together.sort().values, together), "the slots are in random order"
    for group, fills in zip(groups, plan.fills, strict=True):
        assert cursor[group.long()].tolist() == list(fills)


def test_statistics():
    sample = summarise([100.0, 200.0, 300.0, 400.0, 1000.0, 600.0], launches=10)
    assert (sample.median, sample.p20, sample.p80) == (35.0, 20.0, 60.0)
    assert (sample.launches, sample.replays) == (10, 6)
    assert summarise([50.0], 5) == Sample(10.0, 10.0, 10.0, 5, 1)
    with pytest.raises(InvalidValueError):
        summarise([], 5)


# The byte model


def test_bytes_of_a_mamba2_step():
    """Written out for 128 heads × 64 × 128, 8 groups: the sums that GPU_NOTES counted by hand, to the byte."""
    spec, element = SHAPES["nemotron-3-super"], 128 * 64 * 128
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4  # x and B in BF16, Δ in FP32
    query, output = 8 * 128 * 2, 128 * 64 * 2
    nvfp4 = element // 2 + element // 16 + 128 * 4
    policy = StatePolicy(read="nvfp4")
    assert traffic.standard(spec).total == 8 * element + row + query + output
    assert traffic.read(spec, policy, 7).total == nvfp4 + 8 * row + row + query + output
    assert traffic.step("non-flush", spec, policy).total == traffic.read(spec, policy, 7).total
    assert traffic.flush(spec, policy).total == 8 * element + nvfp4 + 16 * row + row + query + output
    assert traffic.flush(spec, StatePolicy()).total == 8 * element + 16 * row + row + query + output
    mixed = (15 * traffic.read(spec, policy, 7).total + traffic.flush(spec, policy).total) / 16
    assert traffic.step("mixed", spec, policy).total == pytest.approx(mixed)
    assert traffic.flush(spec, policy).written["copy"] == nvfp4 and "copy" not in traffic.flush(spec, policy).read


@pytest.mark.parametrize(
    ("shape", "arm", "kind", "megabytes"),
    [
        ("nemotron-3-super", "replay-fp32", "non-flush", 1122),
        ("nemotron-3-super", "decoupled-bf16", "non-flush", 585),
        ("nemotron-3-super", "decoupled-fp8", "non-flush", 325),
        ("nemotron-3-super", "decoupled-nvfp4", "non-flush", 199),
        ("nemotron-3-super", "replay-fp32", "flush", 2230),
        ("qwen3.5-4b", "replay-fp32", "non-flush", 569),
        ("qwen3.5-4b", "decoupled-fp8", "non-flush", 170),
        ("qwen3.5-4b", "decoupled-nvfp4", "non-flush", 107),
        ("qwen3.5-4b", "decoupled-nvfp4", "flush", 1203),
    ],
)
def test_bytes_are_those_counted_before_the_project(shape, arm, kind, megabytes):
    ours = 256 * traffic.step(kind, SHAPES[shape], parse_arm(arm)).total / 1e6
    assert ours == pytest.approx(megabytes, rel=0.006)


def test_the_ring_of_kda_holds_a_decay_per_channel():
    spec = SHAPES["kimi-k3-rank"]
    one, two = (traffic.read(spec, StatePolicy(read="nvfp4"), f).total for f in (3, 4))
    assert two - one == 12 * 128 * 2 * 2 + 12 * 4 + 12 * 128 * 4


def measured(read=(1e6, 4000.0), copy=(1e6, 3000.0)):
    time = Time(1.0, 1.0, 1.0, 1, 1)
    found = [Bandwidth("read", int(size), time, speed) for size, speed in (read, (1e9, 4500.0))]
    return [*found, Bandwidth("copy", int(copy[0]), time, copy[1])]


def test_shares():
    moved = traffic.Traffic({"copy": 3e6}, {"ring": 1e6})
    speed, of_read, of_copy, of_floor = memory.shares(measured(), moved, 2.0)
    assert (speed, of_read, of_copy) == pytest.approx((2000, 0.5, 2 / 3))
    assert of_floor == pytest.approx((2e6 / 4e12 + 2e6 / 3e12) / 2e-6)
    assert memory.at_size(measured(), "read", 8e8) == 4500
    *_, of_floor = memory.shares(measured(), traffic.Traffic({"state": 1e6}, {"state": 3e6}), 2.0)
    assert of_floor == pytest.approx(4e6 / 3e12 / 2e-6), "writes beyond the reads take time too"


# The whole bench, by the interpreter, with a clock that makes its times up

TINY = {
    "mamba2": LayerSpec("mamba2", 2, 1, 16, 32),
    "gdn": LayerSpec("gdn", 2, 1, 16, 32, qk_l2norm=True, query_scale=32**-0.5),
}


class Clock:
    """Runs the first launch of each list, once, and says that launches take 10 µs each, 11 in longer lists."""

    def __init__(self):
        self.lists = []

    def __call__(self, launches, before=None):
        if before is not None:
            before()
        launches[0]()
        self.lists.append(len(launches))
        return summarise([10.0 * len(launches), 11.0 * len(launches), 10.5 * len(launches)], len(launches))


def tiny_plan(family="gdn", arms=("standard", "decoupled-nvfp4"), batches=(2,), **options):
    return bench.Plan({f"tiny-{family}": TINY[family]}, batches, arms, window=3, **options)


@pytest.fixture(scope="module", autouse=True)
def small_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "slots_needed", lambda batch, launch_bytes, l2: 3 * batch)
        patch.setattr(measure, "l2_bytes", lambda device: 100)
        patch.setattr(memory, "l2_bytes", lambda device: 10_000)
        yield


@pytest.fixture(scope="module")
def result(small_pools, tmp_path_factory):
    out = tmp_path_factory.mktemp("speed") / "run"
    plan = tiny_plan("mamba2", ("standard", "replay-fp32", "decoupled-nvfp4"), batches=(2,), breakdown=True)
    return bench.run(plan, out, timer=Clock(), device=CPU, sizes=KILO), out


@interpreted
def test_a_run_checks_then_times_and_is_written_once(result):
    found, out = result
    assert [(c.batch, c.arm, c.status) for c in found.cases] == [
        (2, arm, "timed") for arm in ("standard", "replay-fp32", "decoupled-nvfp4")
    ]
    assert SpeedResult.read(out / "speed.json") == found
    nvfp4 = found.cases[-1]
    assert [s.kind for s in nvfp4.steps] == ["non-flush", "flush", "mixed", "auto"], "four heads are few"
    assert nvfp4.steps[-1].bytes == found.cases[0].steps[0].bytes == 2 * traffic.standard(TINY["mamba2"]).total
    assert nvfp4.amortised_us == pytest.approx((2 * 10.5 + 10.5) / 3) and nvfp4.serving_us == pytest.approx(10.5)
    assert set(nvfp4.breakdown) == {"plan", "window", "readout", "window of a flush", "fold", "renew"}
    assert {c.name for c in nvfp4.checks} >= {"output of reads", "output of flushes", "state of flushes", "copy bytes"}
    assert "output of reads after it" in {c.name for c in nvfp4.checks}
    assert nvfp4.steps[0].bytes == 2 * traffic.step("non-flush", TINY["mamba2"], StatePolicy("fp32", "nvfp4", 3)).total
    assert found.provenance.engine == "kernels" and found.provenance.window == 3
    assert {b.kind for b in found.bandwidth} == {"read", "copy"}
    clock = Clock()
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        bench.run(tiny_plan(), out, timer=clock, device=CPU, sizes=KILO)
    assert not clock.lists, "refused before an hour of measuring, not after it"


@interpreted
@pytest.mark.parametrize("broken", ["scale", "padding"])
def test_a_kernel_whose_check_fails_is_not_timed(broken, monkeypatch, tmp_path):
    """A scale twice as large; a padded row that is written."""
    real = sequence.readout

    def wrong(source, ring_v, theta, gain, c, slots, used, out, **options):
        if broken == "scale":
            real(source, ring_v, theta, 2 * gain, c, slots, used, out, **options)
        else:
            real(source, ring_v, theta, gain, c, slots, used, out, **options)
            out[slots < 0] = 0.0

    monkeypatch.setattr(sequence, "readout", wrong)
    clock = Clock()
    found = bench.run(tiny_plan(), tmp_path / "run", timer=clock, device=CPU, sizes=KILO)
    standard, nvfp4 = found.cases
    assert standard.status == "timed" and nvfp4.status == "refused" and not nvfp4.steps
    assert nvfp4.note.startswith("not timed: padded outputs" if broken == "padding" else "not timed: output of reads")
    assert len(clock.lists) == 3 * 3 + 1, "three sizes of three blocks, and the standard kernel"
    page = table.markdown_page([found])
    assert "| decoupled-nvfp4 | refused |" in page and "not timed" in page


@interpreted
def test_a_run_that_was_cut_short_goes_on(monkeypatch, tmp_path):
    plan = tiny_plan("gdn", ("standard", "decoupled-fp8"))
    monkeypatch.setattr(cases.provenance, "git_state", lambda folder: ("abc", False))

    class Cut(Clock):
        def __call__(self, launches, before=None):
            if len(self.lists) == 10:
                raise KeyboardInterrupt
            return super().__call__(launches, before)

    with pytest.raises(KeyboardInterrupt):
        bench.run(plan, tmp_path, timer=Cut(), device=CPU, sizes=KILO)
    assert len(list((tmp_path / "cases").iterdir())) == 1 and not (tmp_path / "speed.json").exists()
    unfinished = tmp_path / "speed.unfinished.json"
    assert [c.arm for c in SpeedResult.read(unfinished).cases] == ["standard"]
    assert table.main([str(unfinished), "--out", str(tmp_path)]) == 0
    clock = Clock()
    found = bench.run(plan, tmp_path, timer=clock, device=CPU, sizes=KILO)
    assert [c.arm for c in found.cases] == ["standard", "decoupled-fp8"]
    assert len(clock.lists) == 9 + 4, "the standard kernel was not timed again"
    assert not unfinished.exists() and len(SpeedResult.read(tmp_path / "speed.json").cases) == 2


@interpreted
def test_a_check_runs_what_a_large_batch_runs(monkeypatch):
    used = []
    real = launch.run
    monkeypatch.setattr(launch, "TABLE", (
        launch.Entry(launch.Launch(rows=16, warps=1), "readout", max_batch=8),
        launch.Entry(launch.Launch(rows=32, warps=2), "readout", max_batch=64),
        launch.Entry(launch.Launch(rows=64, warps=8), "readout"),
        *launch.TABLE,
    ))  # fmt: skip
    monkeypatch.setattr(
        "quantize_state.kernels.readout.triton.run",
        lambda kernel, grid, chosen, *a, **k: (used.append(chosen.warps), real(kernel, grid, chosen, *a, **k)),
    )
    table_before = launch.TABLE
    for batch in (1, 64, 256):
        with checks.launched_as(batch):
            checks.check_replay(TINY["gdn"], StatePolicy(read="bf16", window=3), CPU)
    assert used == [1, 2, 8] and launch.TABLE is table_before


@interpreted
def test_bandwidth_kernels_copy_and_sum():
    x = torch.randn(3 * 2048)
    sums, y = torch.empty(3), torch.empty_like(x)
    bandwidth.read(x, sums, 2048)
    bandwidth.copy(x, y, 2048)
    assert torch.equal(x, y) and torch.allclose(sums, x.view(3, 2048).sum(1), atol=1e-3)
    with pytest.raises(ValueError, match="multiple of 2048"):
        bandwidth.copy(x[:-1], y[:-1], 2048)


def test_the_peer_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "install the package fla-core" in peers.Fla(TINY["gdn"]).missing()
    found = []
    measure.measure_arm(measure.Bench(Clock(), CPU, measured()), "tiny", TINY["gdn"], "fla", 3, (1, 2), found.append)
    assert [(c.status, c.batch) for c in found] == [("skipped", 1), ("skipped", 2)] and "fla-core" in found[0].note


@pytest.mark.parametrize("family", TINY)
def test_what_a_peer_is_given_is_the_same_recurrence(family, monkeypatch):
    """fla's own definition of the functions, written as plain torch."""
    spec = TINY[family]

    def theirs(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, **options):
        heads = v.shape[2]
        q, k, v = (t[:, 0].float() for t in (q, k, v))
        if options.get("use_qk_l2norm_in_kernel"):
            q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        q, k = (t.repeat_interleave(heads // t.shape[1], 1) for t in (q, k))
        state = initial_state * g[:, 0].exp()[..., None, None]
        if beta is not None:
            v = beta[:, 0, :, None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[..., None, :]
        return torch.einsum("bhkv,bhk->bhv", state, scale * q)[:, None], state

    peer = peers.Fla(spec)
    monkeypatch.setattr(peer, "_function", lambda: theirs)
    assert all(c.passed for c in peer.check(CPU)), peer.check(CPU)
    launches = peer.launches(2, 3, CPU)
    assert len(launches) == 3
    for each in launches:
        each()
    monkeypatch.setattr(peer, "_function", lambda: lambda *a, **k: theirs(*a, **(k | {"scale": 0.9})))
    assert not peer.check(CPU)[0].passed


# What is shown


@interpreted
def test_tables_and_plot(result, capsys, tmp_path):
    found, out = result
    table.print_result(found)
    shown = capsys.readouterr().out
    assert "tiny-mamba2: mamba2, 2/1 × 16 × 32, window 3" in shown and "each launch alone" in shown
    assert re.search(r"2 +standard +– +– +10.5 +10.5 \(\d+ %\) +1.00 .* –\n", shown), shown
    assert re.search(r"decoupled-nvfp4 .* standard 10.5\n", shown) and "auto takes" not in shown
    assert table.main([str(out / "speed.json"), "--out", str(tmp_path)]) == 0
    page, svg = (tmp_path / "README.md").read_text(), (tmp_path / "speed.svg").read_text()
    assert page.count("\n| ") == (1 + 3) + (1 + 2) and "![" in page
    assert svg.startswith("<svg") and "xmlns" in svg and "--decoupled-0:" in svg and "c0ff" not in svg
    assert "decoupled-nvfp4" in svg and "prefers-color-scheme: dark" in svg
    assert table.main([str(tmp_path / "nowhere.json"), "--out", str(tmp_path)]) == 2
    only = replace(found, cases=[c for c in found.cases if c.arm != "standard"])
    assert speedup_svg([only]) is None and "speed.svg" not in table.markdown_page([only], None)


@interpreted
def test_shapes_of_one_batch_have_no_panel_beside_others(result):
    found, _ = result
    assert "tiny-mamba2" in speedup_svg([found]), "alone they have"
    wide = [replace(c, shape="wide", batch=b) for b in (2, 64) for c in found.cases]
    svg = speedup_svg([replace(found, cases=wide), found])
    assert "wide" in svg and "tiny-mamba2" not in svg


@interpreted
def test_auto_is_timed_on_slots_that_come_from_the_standard_kernel():
    """Not on rings that are full, whose tokens it would apply first: that is one step of many."""
    spec, policy = TINY["mamba2"], StatePolicy(read="nvfp4", window=3)
    pool = checks.random_state(spec, policy, 6, seed=0)
    arm = measure.Arm(measure.Bench(Clock(), CPU, (), l2=1), spec, policy, 2, pool)
    launches, before = arm.launches("auto")
    before()
    assert set(pool.cursor.tolist()) == {STALE}
    launches[0]()
    assert set(pool.cursor.tolist()) == {STALE} and (pool.position == 101).sum() == 2


@interpreted
def test_what_serving_takes_and_where_that_is_slower(result):
    """A batch for which the table is right, and one for which it takes replay, too soon."""
    slow = replace(result[0].cases[0].steps[0], kind="mixed", time=Time(12.0, 12.0, 12.0, 1, 5))
    standard, _, nvfp4 = result[0].cases
    large = [
        replace(c, batch=64, steps=[s for s in c.steps if s.kind == "standard"] or [slow]) for c in (standard, nvfp4)
    ]
    found = replace(result[0], cases=[*result[0].cases, *large])
    (line,) = table.slower_than_standard(found)
    assert line.startswith("tiny-mamba2, batch 64, decoupled-nvfp4: auto takes 12.0 µs and the standard kernel 10.5")
    page = table.markdown_page([found])
    assert "| standard 10.5 |" in page and "| replay |" in page and f"- {markdown_text(line)}" in page
    assert "auto" not in table.columns(replace(found, cases=large)) and "Auto:" not in table.markdown_page([], None)


@interpreted
def test_a_damaged_result_is_refused(result, tmp_path):
    text = (result[1] / "speed.json").read_text()
    bad = tmp_path / "speed.json"
    bad.write_text(text.replace('"median": 10.5', '"median": 1.5', 1))
    with pytest.raises(FileFormatError, match="damaged or was edited"):
        SpeedResult.read(bad)


def test_tables_need_no_torch():
    code = "import sys; sys.modules['torch'] = None\nfrom quantize_state.evals.speed import table, plot"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RESULTS = sorted((ROOT / "results" / "speed").glob("speed-*.json"))


@pytest.mark.skipif(not RESULTS, reason="no speed has been measured yet")
def test_the_page_shows_what_results_hold():
    page = (ROOT / "results" / "speed" / "README.md").read_text(encoding="utf-8")
    assert page == table.markdown_page([SpeedResult.read(p) for p in RESULTS]), "run `make report`"


# The command line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bench", r"bench needs a GPU, and TRITON_INTERPRET|bench needs an NVIDIA GPU"),
        ("bench --shape qwen3.5-4", r"unknown shape 'qwen3.5-4'. Did you mean 'qwen3.5-4b'"),
        ("bench --shape 4x64x128", r"shape 4x64x128 needs a family"),
        ("bench --family gnd", r"unknown layer family 'gnd'"),
        ("bench --arms coupled-nvfp4", r"'coupled-nvfp4' has no kernels: they keep an FP32 checkpoint"),
        ("bench --arms decoupled-nvfp8", r"'nvfp8'. Did you mean 'nvfp4'"),
        ("bench --batch 1,x", r"--batch is '1,x'; it must be whole numbers"),
        ("bench --batch 0", r"batch is 0; it must be 1 to 4096"),
        ("bench --peer flaa", r"unknown peer 'flaa'. Did you mean 'fla'"),
        ("bench --window 0", r"window is 0"),
    ],
)
def test_bad_input_is_one_clear_line(command, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(says, err), err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_needs_no_gpu(capsys):
    assert main(["bench", "--dry-run", "--json", "--family", "gdn", "--batch", "8,256", "--peer", "fla"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["shape"], r["arm"]) for r in rows[:5]] == [
        ("qwen3.5-4b", a) for a in ("standard", "replay-fp32", "decoupled-fp8", "decoupled-nvfp4", "fla")
    ]
    assert rows[3]["bytes_per_row"]["non-flush"] == 420224 and rows[0]["batches"] == [8, 256]
    assert main(["bench", "--dry-run", "--shape", "all", "--arms", "all"]) == 0
    shown = capsys.readouterr().out
    for word in ("kimi-k3-rank", "decoupled-mxfp4", "779,264", "non-flush"):
        assert word in shown
