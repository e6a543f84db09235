"""The sweep of launches: what it tries, that a wrong candidate is not timed, and entries that the table can take."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import json
import re
from dataclasses import replace

import pytest
import torch

from quantize_state.evals.speed import measure, sweep
from quantize_state.evals.speed.result import Case, SpeedResult, Step, Time
from quantize_state.kernels import launch, paths
from quantize_state.kernels.device.targets import INTERPRET
from quantize_state.kernels.launch import Entry, Launch, find_launch
from quantize_state.kernels.paths import Crossover, standard_pays
from quantize_state.kernels.shapes import SHAPES
from quantize_state.kernels.timing import Sample
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.spec import LayerSpec

TINY = LayerSpec("gdn", 2, 1, 16, 32, qk_l2norm=True, query_scale=32**-0.5)
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRET, reason="Triton was imported without TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(measure, "slots_needed", lambda batch, launch_bytes, l2: 3 * batch)


class Clock:
    """The n-th list of launches takes the n-th time; the first launch of each is run."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self, launches, before=None):
        if before is not None:
            before()
        launches[0]()
        t = self.times.pop(0) if self.times else 50.0
        return Sample(t, t, t, len(launches), 5)


@pytest.fixture
def no_check(monkeypatch):
    """For tests in which kernels only have to run."""
    monkeypatch.setattr(sweep, "check", lambda spec, policy, device: [])


def bench(*times):
    return measure.Bench(Clock(*times), CPU, (), l2=100)


@pytest.mark.parametrize("op", sweep.OPS)
def test_candidates_begin_with_the_tables_own_and_fit(op):
    spec = SHAPES["nemotron-3-super"]
    base = Launch(warps=4, rows=32, columns=64, programs=264)
    found = sweep.candidates(op, base, spec)
    assert found[0] == base and len(found) == len(set(found)) > 3
    changed = {name for c in found for name, value in vars(c).items() if value != getattr(base, name)}
    expected = {"standard": {"rows"}, "readout": {"rows"}, "fold": {"rows", "columns", "programs"}}
    expected["fold_long"] = expected["fold"]
    expected["renew"] = {"rows", "programs"}
    assert changed == expected.get(op, set()) | {"warps"}


@interpreted
def test_the_fastest_correct_candidate_becomes_an_entry(no_check):
    before = launch.TABLE
    tried = sweep.sweep(bench(20.0, 30.0, 10.0, 19.9), "plan", TINY, StatePolicy(read="nvfp4", window=3), [2], limit=4)
    assert [t.microseconds for t in tried] == [20.0, 30.0, 10.0, 19.9] and launch.TABLE is before
    ((entry, us, old),) = sweep.best_entries("plan", TINY, StatePolicy(read="nvfp4"), 90, tried)
    assert (us, old) == (10.0, 20.0) and entry == Entry(tried[2].launch, "plan", isa=90)


@interpreted
def test_what_is_timed_runs_the_candidate(monkeypatch):
    used = []
    real = launch.run
    monkeypatch.setattr(
        "quantize_state.kernels.standard.triton.run",
        lambda kernel, grid, chosen, *a, **k: (used.append(chosen), real(kernel, grid, chosen, *a, **k)),
    )
    tried = sweep.sweep(bench(), "standard", TINY, None, [2], limit=3)
    assert list(dict.fromkeys(used)) == [t.launch for t in tried] and len(tried) == 3


@interpreted
def test_a_wrong_candidate_is_not_timed(monkeypatch):
    real = launch.run

    def wrong_with_two_warps(kernel, grid, chosen, *arguments, **constants):
        if chosen.warps == 2:
            constants["SCALE"] = 2 * constants["SCALE"]
        if chosen.warps == 8:
            raise RuntimeError("out of resource:\nshared memory")
        real(kernel, grid, chosen, *arguments, **constants)

    monkeypatch.setattr("quantize_state.kernels.standard.triton.run", wrong_with_two_warps)
    tried = sweep.sweep(bench(), "standard", TINY, None, [1])
    for t in tried:
        if t.launch.warps == 2:
            assert t.microseconds is None and t.problem.startswith("wrong: output")
        elif t.launch.warps == 8:
            assert t.problem == "RuntimeError: out of resource: shared memory"
        else:
            assert t.microseconds == 50.0
    assert {t.launch.warps for t in tried} >= {1, 2, 4}


def test_entries_by_batch_and_noise():
    slow, fast, same = Launch(warps=1), Launch(warps=2), Launch(warps=4)
    tried = [
        *(sweep.Tried(1, c, us) for c, us in ((slow, 10.0), (fast, 5.0), (same, 9.9))),
        *(sweep.Tried(32, c, us) for c, us in ((slow, 10.0), (fast, 12.0), (same, 9.9))),
        *(sweep.Tried(256, c, us, "" if us else "wrong") for c, us in ((slow, None), (fast, 12.0), (same, 8.0))),
    ]
    found = sweep.best_entries("renew", TINY, StatePolicy(read="fp8_e4m3"), 90, tried)
    assert [(e.max_batch, e.launch, us) for e, us, _ in found] == [(1, fast, 5.0), (None, same, 8.0)]
    for entry, *_ in found:
        spelt = sweep.source(entry)
        assert eval(spelt.removesuffix(","), {"Entry": Entry, "Launch": Launch}) == entry
    with sweep.preferred(found[0][0]):
        assert find_launch("renew", "fp8_e4m3", 16, 32, 90, 1) == fast
        assert find_launch("renew", "fp8_e4m3", 16, 32, 90, 2) != fast
        assert find_launch("renew", "nvfp4", 16, 32, 90, 1) != fast


def test_the_tables_key_is_what_the_kernels_ask_for():
    """By recording the look-ups of a step."""
    from quantize_state.kernels.compile import record
    from quantize_state.kernels.device.targets import TARGETS

    for policy in (StatePolicy(read="nvfp4"), StatePolicy()):
        for family in ("gdn", "mamba2"):
            spec = replace(TINY, family=family)
            for op in ("readout", "fold", "window", "plan", *(["renew"] if policy.read else [])):
                marked = Launch(rows=16, warps=16, columns=32, programs=1)
                sizes = {} if op == "plan" else {"value_dim": 16, "key_dim": 32}
                with sweep.preferred(Entry(marked, op, sweep.key_of(op, spec, policy) or None, isa=90, **sizes)):
                    calls = record(spec, policy, TARGETS["90a"])
                names = [c.kernel.__name__ for c in calls if c.keywords["num_warps"] == 16]
                wanted = (op, "accept") if op == "plan" else (op,)  # accepting is as small a launch
                assert names and all(any(w in n for w in wanted) for n in names), (policy.name, family, op, names)


def speed_result(times):
    """A result whose cases have given serving times: {(arm, batch): µs}."""
    one = Time(1.0, 1.0, 1.0, 1, 1)
    cases = []
    for (arm, batch), us in times.items():
        kind = "standard" if arm == "standard" else "mixed"
        step = Step(kind, replace(one, median=us), {}, {}, 1.0, 1.0, 1.0, 1.0)
        cases.append(Case("s", "gdn", 2, 1, 16, 32, batch, 16, arm, "timed", "", [], [step], us))
    return SpeedResult([], cases, None)


def test_where_the_standard_kernel_is_as_fast(tmp_path, capsys, monkeypatch):
    times = {("standard", b): float(b) for b in (1, 8, 32, 64)}
    times |= {("decoupled-nvfp4", b): us for b, us in ((1, 5.0), (8, 8.0), (32, 20.0), (64, 70.0))}
    times |= {("replay-fp32", b): us for b, us in ((1, 0.5), (8, 9.0))} | {("fla", 1): 9.0}
    result = speed_result(times)
    entries = [
        Crossover(16, "gdn", "nvfp4", value_dim=16, key_dim=32), Crossover(0, "gdn", "fp32", value_dim=16, key_dim=32)
    ]  # fmt: skip
    assert [entry for entry, _ in sweep.crossovers(result)] == entries
    monkeypatch.setattr(SpeedResult, "read", classmethod(lambda cls, path: result))
    assert sweep.main(["--paths", str(tmp_path / "speed.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [eval(line.split("  #")[0].strip().removesuffix(","), {"Crossover": Crossover}) for line in lines] == entries
    assert lines[0].endswith("# s: 2 to 128 heads measured")
    result.cases[:] = [c for c in result.cases if c.batch > 1]
    assert sweep.main(["--paths", str(tmp_path / "speed.json")]) == 2
    assert "from batch 1 on: bench --batch 1,2,4" in capsys.readouterr().err


def test_shapes_of_one_kind_share_a_crossover():
    """Points of all shapes in one row of heads; the table's entry stops before the first at which replay is faster."""
    cases = [replace(c, shape="wide", heads=64) for c in speed_result({
        ("standard", 1): 9.0, ("decoupled-nvfp4", 1): 9.5, ("standard", 2): 12.0, ("decoupled-nvfp4", 2): 11.0,
    }).cases]  # fmt: skip
    narrow = speed_result({("standard", 1): 3.0, ("decoupled-nvfp4", 1): 8.0}).cases
    ((entry, comment),) = sweep.crossovers(SpeedResult([], [*cases, *narrow], None))
    assert entry.heads == 64 and comment == "wide, s: 2 to 128 heads measured"
    spec = replace(TINY, heads=64, key_heads=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "CROSSOVERS", (entry,))
        assert standard_pays(spec, StatePolicy(read="nvfp4"), 90, 1)
        assert not standard_pays(spec, StatePolicy(read="nvfp4"), 90, 2)


@interpreted
def test_the_command(capsys, tmp_path, no_check, monkeypatch):
    monkeypatch.setattr(sweep, "l2_bytes", lambda device: 100)
    file = tmp_path / "sweep.json"
    command = "--op plan --shape 2/1x16x32 --family gdn --batch 1,2 --window 3 --limit 2 --json".split()  # noqa: SIM905
    assert sweep.main([*command, str(file)], timer=Clock(20.0, 10.0, 20.0, 19.9), device=CPU) == 0
    out, err = capsys.readouterr()
    assert re.search(r'Entry\(Launch\(warps=\d\), "plan", isa=0, max_batch=1\),  # 10.00 µs, 20.00 before', out)
    assert err.count("batch 1:") == 2 and err.count("batch 2:") == 2
    (record,) = json.loads(file.read_text())["sweeps"]
    assert record["op"] == "plan" and len(record["tried"]) == 4 and len(record["entries"]) == 1
    assert sweep.main([*command, str(file)], timer=Clock(), device=CPU) == 2, "never overwritten"
    for bad in ("--batch x", "--shape nowhere", "--arm coupled-nvfp4", "--paths nowhere.json"):
        assert sweep.main(bad.split(), timer=Clock(), device=CPU) == 2
    assert sweep.main(["--op", "plan"]) == 2
    assert "sweep needs a GPU" in capsys.readouterr().err
