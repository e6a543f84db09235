"""Documents shared between two processes: the same numbers as one process, and nothing finished is lost."""

import os
import subprocess
import sys

import pytest
import torch
from accelerate import cpu_offload

from quantize_state import evaluate
from quantize_state.evals.models import load_model
from quantize_state.evals.result import Result
from quantize_state.evals.team import Team
from quantize_state.quant.errors import InvalidValueError

ARGUMENTS = ["tiny-gdn", "--arms", "reference-again,decoupled-nvfp4", "--tokens", "48", "--sequences", "3"]


def torchrun(tmp_path, *arguments, script="quantize_state", **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return subprocess.Popen(
        [*command, "-m", script, *arguments], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    loaded = load_model("tiny-gdn", device="cpu")
    return evaluate(loaded, ["reference-again", "decoupled-nvfp4"], tokens=48, sequences=3)


def test_two_processes_give_the_result_of_one_document_by_document(tmp_path, alone):
    process = torchrun(tmp_path, "eval", *ARGUMENTS, "--out", "run")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("run/result.json") == 1, "only the first process speaks"
    shared = Result.read(tmp_path / "run")
    assert shared.provenance.processes == 2 and alone.provenance.processes == 1
    for mine, theirs in zip(alone.arms, shared.arms, strict=True):
        assert len(mine.kl.by_document) == 3
        assert (mine.kl, mine.ppl, mine.layers) == (theirs.kl, theirs.ppl, theirs.layers)
    assert len(set(alone.arm("decoupled-nvfp4").kl.by_document)) == 3, "a check that can't fail: all documents equal"
    assert not list((tmp_path / "run").glob("shards/*")), "a finished arm's shards are gone"


DIES = """
import os, signal, sys
from quantize_state.evals import measure
from quantize_state.evals.measure import Measured

save = Measured.save

def save_and_die(self, path, fingerprint):
    save(self, path, fingerprint)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

Measured.save = save_and_die
from quantize_state.cli import main
sys.exit(main())
"""


def test_a_process_that_dies_fails_the_run_and_finished_documents_are_resumed(tmp_path, alone):
    (tmp_path / "dies.py").write_text(DIES)
    process = torchrun(tmp_path, "eval", *ARGUMENTS, "--out", "run", script="dies")
    _, err = process.communicate(timeout=300)
    assert process.returncode not in (0, None)
    assert "SIGKILL" in err or "Signal 9" in err, err
    kept = sorted(path.name for path in (tmp_path / "run").glob("shards/*/*.npz"))
    assert "1.npz" in kept, "the document that the dead process had finished"
    loaded = load_model("tiny-gdn", device="cpu")
    seen = []
    result = evaluate(
        loaded, ["reference-again", "decoupled-nvfp4"], tokens=48, sequences=3, out=tmp_path / "run",
        progress=lambda what, done, total: seen.append(what),
    )  # fmt: skip
    assert [arm.kl for arm in result.arms] == [arm.kl for arm in alone.arms]
    assert len(seen) == 6 - len(kept), "one chunk for each document of each arm, but for those that were finished"


def test_what_a_team_is(monkeypatch):
    assert Team().share(5) == [0, 1, 2, 3, 4] and Team().first
    assert Team(1, 2).share(5) == [1, 3] and Team(2, 4).share(2) == []
    assert Team().agree(lambda: 3) == 3 and Team().gather(4) == [4] and Team().wait() is None
    with pytest.raises(InvalidValueError, match="device-map"):
        evaluate("tiny-gdn", device_map="auto", team=Team(0, 2))


def test_device_map_spreads_a_model():
    """One CPU is all that a test has to spread over; accelerate's hooks around every module are the same."""
    loaded = load_model("tiny-gdn", device_map="auto")
    arms = ["reference-again", "decoupled-nvfp4"]
    plain = evaluate(loaded, arms, tokens=48)
    cpu_offload(loaded.model, execution_device=torch.device("cpu"))
    assert next(loaded.model.parameters()).device.type == "meta", "a check that can't fail: nothing was taken away"
    assert [arm.kl for arm in evaluate(loaded, arms, tokens=48).arms] == [arm.kl for arm in plain.arms]
    with pytest.raises(InvalidValueError, match="can't go together"):
        load_model("tiny-gdn", device="cpu", device_map="auto")
