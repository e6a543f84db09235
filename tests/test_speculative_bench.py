"""``bench --speculative`` without a GPU: where cursors stand, bytes, a run by the interpreter, tables, refusals."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from quantize_state.cli import main
from quantize_state.evals.speed import cases, memory, speculative, speculative_table, traffic, verify_measure
from quantize_state.evals.speed.acceptance import Row, accepted_counts, cursor_shares, expected_tokens, spread
from quantize_state.evals.speed.plot import verification_svg
from quantize_state.evals.speed.result import SpeculativeResult
from quantize_state.evals.speed.verify_measure import Job, check_all, moved_bytes, resident_bytes
from quantize_state.kernels import checks, launch, sequence
from quantize_state.kernels.device.targets import INTERPRET
from quantize_state.kernels.shapes import SHAPES
from quantize_state.kernels.speculative import plan as device_plan
from quantize_state.kernels.timing import Sample
from quantize_state.quant.errors import QuantizeStateError
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.spec import LayerSpec

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TINY = LayerSpec("mamba2", 2, 1, 16, 32)
interpreted = pytest.mark.skipif(not INTERPRET, reason="Triton was imported without TRITON_INTERPRET=1")


# Where cursors stand


@pytest.mark.parametrize(("window", "tokens"), [(16, 4), (3, 2), (4, 4), (8, 8)])
def test_a_row_is_what_the_device_plans(window, tokens):
    cursors = list(range(window))
    closing, verified = device_plan(torch.tensor(cursors), window, tokens)
    rows = [Row(c, window, tokens) for c in cursors]
    assert [r.closing for r in rows] == closing.tolist() and [r.verified for r in rows] == verified.tolist()


@pytest.mark.parametrize(
    ("tokens", "acceptance", "per_step"),
    [(2, 0.8, 1.75), (4, 0.6, 2.06), (4, 0.8, 2.75), (6, 0.8, 3.30), (8, 0.8, 3.63)],
)
def test_tokens_per_step_are_those_that_the_docs_have_simulated(tokens, acceptance, per_step):
    shares = cursor_shares(16, tokens, acceptance)
    assert sum(shares) == pytest.approx(1)
    assert expected_tokens(16, tokens, acceptance, shares) == pytest.approx(per_step, abs=0.006)


def test_cursor_shares_are_those_of_rows_that_are_served():
    """A simulation of a single row: its cursors over a long time, and how often windows end."""
    rng, window, tokens, acceptance = random.Random(0), 8, 3, 0.7
    seen, cursor = Counter(), 0
    for _ in range(40_000):
        seen[cursor] += 1
        accepted = 1
        while accepted < tokens and rng.random() < acceptance:
            accepted += 1
        cursor = Row(cursor, window, tokens).after(accepted)
    shares = cursor_shares(window, tokens, acceptance)
    for c in range(window):
        assert seen[c] / 40_000 == pytest.approx(shares[c], abs=0.01)
    # every token is in one window of 8, so windows end once in 8 tokens
    assert shares[-1] * window == pytest.approx(expected_tokens(window, tokens, acceptance, shares))
    assert accepted_counts(tokens, acceptance) == pytest.approx([0.3, 0.21, 0.49])


def test_a_single_token_stands_everywhere_alike():
    assert cursor_shares(5, 1, 0.8) == pytest.approx([0.2] * 5)


@pytest.mark.parametrize(("groups", "batch"), [(1, 64), (64, 1), (4, 16)])
def test_every_group_has_the_shares(groups, batch):
    shares = [0.5, 0.25, 0.0, 0.25]
    rows = spread(shares, groups, batch)
    assert [len(r) for r in rows] == [batch] * groups
    together = Counter(c for row in rows for c in row)
    assert [together[c] / 64 for c in range(4)] == shares
    if batch == 16:
        assert all([Counter(row)[c] / 16 for c in range(4)] == shares for row in rows)


# Bytes


def test_bytes_of_a_verification():
    """Written out for 128 heads × 64 × 128, 8 groups."""
    spec, policy, element = SHAPES["nemotron-3-super"], StatePolicy(read="nvfp4"), 128 * 64 * 128
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    query, output = 8 * 128 * 2, 128 * 64 * 2
    nvfp4 = element // 2 + element // 16 + 128 * 4
    four = traffic.verification(spec, policy, 5, 4, False)
    assert four.total == nvfp4 + 5 * row + 4 * (2 * row + query + output)
    closing = traffic.verification(spec, policy, 15, 4, True)
    assert closing.total == traffic.flush(spec, policy).total + nvfp4 + 3 * (2 * row + query + output)
    assert traffic.verification(spec, policy, 7, 1, False).total == traffic.read(spec, policy, 7).total
    assert traffic.verification(spec, policy, 15, 1, True).total == traffic.flush(spec, policy).total
    assert traffic.snapshots(spec, 4).total == 4 * element * 5 + 4 * (row + query + output)
    assert traffic.snapshots(spec, 1).total == traffic.standard(spec).total
    single = moved_bytes(spec, "decoupled-nvfp4", 16, 1, 1.0).total
    assert single == pytest.approx(traffic.step("mixed", spec, policy).total)
    reads = moved_bytes(spec, "decoupled-nvfp4", 16, 1, None).total
    assert reads == pytest.approx(traffic.step("non-flush", spec, policy).total)


def test_memory_is_that_of_the_docs():
    """docs/speculative.md, KiB of one sequence: a state for every token, or checkpoint, copy and ring."""
    spec = SHAPES["nemotron-3-super"]
    assert [resident_bytes(spec, "snapshots", 16, t) // 1024 for t in (2, 4, 8)] == [8192, 16384, 32768]
    assert round(resident_bytes(spec, "decoupled-nvfp4", 16, 4) / 1024) == 4969
    assert resident_bytes(spec, "standard", 16, 8) == 4 * spec.elements


# A whole run


class Clock:
    """Runs the first launch of each list, once; times grow with how many there have been."""

    def __init__(self, stop=None):
        self.lists, self.stop = [], stop

    def __call__(self, launches, before=None):
        if len(self.lists) == self.stop:
            raise KeyboardInterrupt
        if before is not None:
            before()
        launches[0]()
        self.lists.append(len(launches))
        us = 10.0 + len(self.lists)
        return Sample(us, us, us, len(launches), 1)


KILO = {"read": (2**16, 2**17), "copy": (2**16,)}
BLOCKS = 9  # times of the bandwidth


@pytest.fixture(scope="module", autouse=True)
def small_pools():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_measure, "cold_groups", lambda launch_bytes, l2: 2)
        patch.setattr(verify_measure, "ROWS", 1)
        patch.setattr(memory, "l2_bytes", lambda device: 10_000)
        yield


def tiny_plan(arms=("decoupled-nvfp4",), tokens=(1, 2), batches=(2,)):
    return speculative.Plan({"tiny": TINY}, batches, ("standard", "snapshots", *arms), tokens, 4, 0.8)


@pytest.fixture(scope="module")
def result(small_pools, tmp_path_factory):
    out = tmp_path_factory.mktemp("speculative") / "run"
    return speculative.run(tiny_plan(), out, timer=Clock(), device=CPU, sizes=KILO), out


@interpreted
def test_a_run_checks_then_times_and_is_written_once(result):
    found, out = result
    arms = ("standard", "snapshots", "decoupled-nvfp4")
    assert [(c.tokens, c.arm, c.status) for c in found.cases] == [(t, a, "timed") for t in (1, 2) for a in arms]
    assert SpeculativeResult.read(out / "speculative.json") == found
    one, two = (next(c for c in found.cases if c.arm == arms[2] and c.tokens == t) for t in (1, 2))
    assert [s.kind for s in one.steps] == ["reads", "full"] and [s.kind for s in two.steps] == [
        "reads",
        "full",
        "partial",
    ]
    assert "output of reads" in {c.name for c in two.checks} and "verified tokens" in {c.name for c in two.checks}
    assert two.steps[2].acceptance == 0.8 and two.steps[1].acceptance == 1.0 and two.steps[0].flushing == 0.0
    # in windows of 4, pairs that are all accepted never meet the end with their second token
    assert two.steps[0].accepted == two.steps[1].accepted == 2 and 1 < two.steps[2].accepted < 2
    assert two.steps[1].bytes == pytest.approx(2 * moved_bytes(TINY, arms[2], 4, 2, 1.0).total)
    assert found.cases[1].steps[0].bytes == 2 * traffic.snapshots(TINY, 1).total
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        speculative.run(tiny_plan(), out, timer=Clock(), device=CPU, sizes=KILO)


@interpreted
def test_rows_stand_where_the_shares_say(monkeypatch):
    """What is launched: plain steps T at a time, a slot for every token, cursors by their shares, counts in range."""
    seen = []
    real = sequence.verify

    def verify(state, inputs, slots, **options):
        seen.append((inputs.tokens, state.cursor[slots.long()].tolist(), slots.tolist()))
        return real(state, inputs, slots, **options)

    monkeypatch.setattr(verify_measure.sequence, "verify", verify)
    monkeypatch.setattr(verify_measure, "ROWS", 8)

    def every(launches, before=None):
        before()
        start = len(seen)
        for each in launches:
            each()
        slots = [s for _, _, row in seen[start:] for s in row]
        assert len(set(slots)) == len(slots), "groups share no slot"
        return Sample(1.0, 1.0, 1.0, len(launches), 1)

    own = verify_measure.Bench(every, CPU, [], 100, 4, 0.8, (4,), (2,))
    monkeypatch.setattr(verify_measure.memory, "shares", lambda *a: (1.0, 1.0, 1.0, 1.0))
    steps = verify_measure.Shape(own, TINY).steps("replay-fp32", 4, 2)
    assert [s.kind for s in steps] == ["reads", "full", "partial"]
    reads, full, partial = (Counter(c for _, row, _ in seen[i : i + 2] for c in row) for i in (0, 2, 4))
    assert reads == {0: 4, 1: 4}, "no row closes or is cut: two tokens fit below the end"
    for counts, acceptance in ((full, 1.0), (partial, 0.8)):
        shares = cursor_shares(4, 2, acceptance)
        assert all(abs(counts[c] - 8 * shares[c]) <= 1 for c in range(4)), counts


@interpreted
@pytest.mark.parametrize("broken", ["queries", "raises"])
def test_what_fails_its_check_is_not_timed(broken, monkeypatch, tmp_path):
    """Outputs of two queries in each other's place, and a kernel that does not compile."""
    real = sequence.readout

    def wrong(source, ring_v, theta, gain, c, slots, used, out, **options):
        if broken == "raises":
            raise RuntimeError("out of\nregisters")
        real(source, ring_v, theta.flip(1), gain, c, slots, used, out, **options)

    monkeypatch.setattr(sequence, "readout", wrong)
    clock = Clock()
    found = speculative.run(tiny_plan(tokens=(2,)), tmp_path / "run", timer=clock, device=CPU, sizes=KILO)
    standard, snapshots, nvfp4 = found.cases
    assert standard.status == snapshots.status == "timed" and nvfp4.status == "refused" and not nvfp4.steps
    says = "RuntimeError: out of registers" if broken == "raises" else "output of reads"
    assert nvfp4.note.startswith(f"not timed: {says}"), nvfp4.note
    assert len(clock.lists) == BLOCKS + 2
    page = speculative_table.markdown_page([found], None)
    assert "| decoupled-nvfp4 | refused |" in page and "not timed" in page


@interpreted
def test_a_run_that_was_cut_short_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(cases.provenance, "git_state", lambda folder: ("abc", False))
    plan = tiny_plan(arms=(), tokens=(1, 2))
    with pytest.raises(KeyboardInterrupt):
        speculative.run(plan, tmp_path, timer=Clock(stop=BLOCKS + 3), device=CPU, sizes=KILO)
    assert len(list((tmp_path / "cases").iterdir())) == 3 and not (tmp_path / "speculative.json").exists()
    assert len(SpeculativeResult.read(tmp_path / "speculative.unfinished.json").cases) == 3
    clock = Clock()
    found = speculative.run(plan, tmp_path, timer=clock, device=CPU, sizes=KILO)
    assert len(clock.lists) == BLOCKS + 1 and len(found.cases) == 4


@interpreted
def test_checks_are_shared_and_run_in_processes():
    """Plain steps are checked once, whatever T; what is checked in other processes is found there too."""
    todo = [("standard", 1, 2), ("standard", 2, 2), ("standard", 2, 300)]
    ours = check_all(TINY, todo, 4, CPU, 1)
    theirs = check_all(TINY, [*todo, ("snapshots", 1, 2)], 4, CPU, 2)
    assert len(ours) == 2 and len({id(v) for v in ours.values()}) == 1
    key = next(iter(ours))
    assert theirs[key] == ours[key] and all(isinstance(c, checks.Check) for c in theirs[key])
    assert verify_measure._safely(Job(TINY, "decoupled-nvfp4", 4, 0, 1, "cpu")).count("\n") == 0


@interpreted
def test_a_check_runs_what_its_batch_runs(monkeypatch):
    table = (launch.Entry(launch.Launch(rows=16, warps=1), "readout_many", max_batch=8), *launch.TABLE)
    monkeypatch.setattr(launch, "TABLE", table)
    rows = []

    def checked(*arguments, **options):
        rows.append(launch.find_launch("readout_many", "nvfp4", 16, 32, 0, 6).rows)
        return []

    monkeypatch.setattr(verify_measure, "check_verify", checked)
    for batch in (8, 9):
        verify_measure.check(Job(TINY, "decoupled-nvfp4", 4, 2, batch, "cpu"))
    assert rows == [16, 64] and launch.TABLE is table


@interpreted
def test_what_is_timed_is_compiled_beside_the_checks(monkeypatch):
    """By the launches of the job's batch, once for each arm, and with the types that are timed."""
    monkeypatch.setattr(verify_measure, "ROWS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen = []
    real = sequence.verify
    monkeypatch.setattr(
        verify_measure.sequence, "verify", lambda *a, **k: (seen.append(k["out"].dtype), real(*a, **k))[1]
    )
    for arm in ("standard", "snapshots", "replay-fp32"):
        verify_measure._compile_timed(Job(TINY, arm, 4, 2, 2, "cpu"))
    assert seen == [torch.bfloat16] * 3, "reads, full and partial"


@interpreted
def test_tables_and_plot(result, capsys, tmp_path):
    found, out = result
    speculative_table.print_result(found)
    shown = capsys.readouterr().out
    assert "tiny: mamba2, 2/1 × 16 × 32, window 4" in shown and "KiB of one sequence" in shown
    assert speculative_table.main([str(out / "speculative.json"), "--out", str(tmp_path)]) == 0
    page, svg = (tmp_path / "speculative.md").read_text(), (tmp_path / "speculative.svg").read_text()
    times = {(c.arm, c.tokens, s.kind): s.time.median for c in found.cases for s in c.steps}
    nvfp4 = re.search(r"\|  \|  \| decoupled-nvfp4 \| (.*) \|\n\n", page)[1].split(" | ")
    assert nvfp4[0].startswith(f"{times['decoupled-nvfp4', 2, 'reads']:.1f} (")
    ratios = [
        times["decoupled-nvfp4", 2, "reads"] / times["decoupled-nvfp4", 1, "reads"],
        times["standard", 2, "full"] / times["decoupled-nvfp4", 2, "full"],
        times["snapshots", 2, "full"] / times["decoupled-nvfp4", 2, "full"],
        times["snapshots", 2, "full"] / times["decoupled-nvfp4", 2, "reads"],
    ]
    assert [nvfp4[1], *nvfp4[6:]] == [f"{r:.2f}" for r in ratios]
    assert svg.startswith("<svg") and "decoupled-nvfp4" in svg and "snapshots" in svg
    assert speculative_table.main([str(tmp_path / "nowhere.json"), "--out", str(tmp_path)]) == 2
    single = SpeculativeResult(found.bandwidth, [c for c in found.cases if c.tokens == 1], found.provenance)
    assert verification_svg([single]) is None


def test_tables_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\nfrom quantize_state.evals.speed import speculative_table, acceptance"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RESULTS = sorted((ROOT / "results" / "speed").glob("speculative-*.json"))


@pytest.mark.skipif(not RESULTS, reason="no verification has been measured yet")
def test_the_page_shows_what_results_hold():
    page = (ROOT / "results" / "speed" / "speculative.md").read_text(encoding="utf-8")
    assert page == speculative_table.markdown_page([SpeculativeResult.read(p) for p in RESULTS]), "run `make report`"


# The command line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bench --speculative", r"bench needs a GPU, and TRITON_INTERPRET|bench needs an NVIDIA GPU"),
        ("bench --speculative --tokens 0", r"--tokens has 0; a verification takes 1 to 16"),
        ("bench --speculative --tokens 17", r"--tokens has 17"),
        ("bench --speculative --tokens two", r"--tokens is 'two'; it must be whole numbers"),
        ("bench --speculative --acceptance 1.5", r"acceptance is 1.5"),
        ("bench --speculative --arms decoupled-nvfp8", r"'nvfp8'. Did you mean 'nvfp4'"),
        ("bench --speculative --window 1", r"no ring"),
        ("bench --speculative --breakdown", r"leave them out with --speculative"),
        ("bench --tokens 4", r"go with --speculative"),
    ],
)
def test_bad_input_is_one_clear_line(command, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(says, err), err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_needs_no_gpu(capsys):
    assert main(["bench", "--speculative", "--dry-run", "--json", "--tokens", "1,4", "--arms", "decoupled-nvfp4"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["shape"], r["arm"]) for r in rows] == [
        (s, a) for s in ("nemotron-3-super", "qwen3.5-4b") for a in ("standard", "snapshots", "decoupled-nvfp4")
    ]
    assert rows[0]["batches"] == [1, 32, 128, 256, 512]
    assert rows[1]["bytes_per_row"]["T = 4"] == traffic.snapshots(SHAPES["nemotron-3-super"], 4).total
