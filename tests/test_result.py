"""Results on disk: the schema, damage of every kind, writing that never leaves half a file, and runs that resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_results import fake_result

from quantize_state.evals import records
from quantize_state.evals.provenance import collect, git_state, now, sha256_of_files
from quantize_state.evals.result import Result, StoredArm
from quantize_state.evals.rundir import RunDirectory, fresh_folder
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError

CONFIGURATION = {"weights": "ab", "tokens": 4096, "window": 16}


@pytest.fixture(scope="module")
def result() -> Result:
    return fake_result(sequences=2, tokens=512, layers=2)


@pytest.fixture
def file(result, tmp_path) -> Path:
    path = tmp_path / "result.json"
    result.write(path)
    return path


def rewrite(path: Path, change) -> None:
    """Change the document and give it a checksum that fits, as a program with a fault would."""
    plain = json.loads(path.read_text())
    del plain["checksum"]
    change(plain)
    plain["checksum"] = records.digest(plain)
    path.write_text(json.dumps(plain))


# schema


def test_round_trip(result, file):
    assert Result.read(file) == result
    assert Result.read(file.parent) == result
    assert result.arm("decoupled-nvfp4").kl.mean > 0
    with pytest.raises(InvalidValueError, match="Did you mean 'decoupled-nvfp4'"):
        result.arm("decoupled-nvfp")


def test_the_keys_that_others_rely_on(file):
    plain = json.loads(file.read_text())
    assert plain["schema"] == "quantize-state/result/1"
    assert {"kind", "model", "text", "arms", "provenance", "status"} <= set(plain)
    arm = plain["arms"][-1]
    assert {"name", "policy", "kl", "top1_agreement", "ppl", "bytes_per_element", "layers", "seconds"} <= set(arm)
    assert {"mean", "ci95", "p999", "max", "reverse_mean", "by_position"} <= set(arm["kl"])
    assert {"start", "stop", "mean", "ci95", "count"} == set(arm["kl"]["by_position"][0])
    assert {"rate", "ties"} <= set(arm["top1_agreement"])
    assert {"arm", "reference", "ratio"} <= set(arm["ppl"])
    assert {"resident", "moved_per_step"} == set(arm["bytes_per_element"])
    layer = {"name", "family", "policy", "state_error_by_position", "output_error_by_position", "exponents"}
    assert layer <= set(arm["layers"][0])


def test_numbers_survive_exactly(result, tmp_path):
    arm = result.arms[0]
    odd = dataclasses.replace(arm, seconds=0.1 + 0.2, kl=dataclasses.replace(arm.kl, mean=5e-324, max=1e300))
    dataclasses.replace(result, arms=[odd]).write(tmp_path / "odd.json")
    assert Result.read(tmp_path / "odd.json").arms[0] == odd


# damage


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(FileFormatError, match=r"nothing\.json does not exist"):
        Result.read(tmp_path / "nothing.json")
    (tmp_path / "empty.json").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"empty\.json is not whole JSON \(0 bytes"):
        Result.read(tmp_path / "empty.json")


def test_truncated_anywhere(file):
    whole = file.read_bytes()
    for keep in [*range(1, 40), *random.Random(0).sample(range(len(whole) - 1), 60)]:
        file.write_bytes(whole[:keep])
        with pytest.raises(FileFormatError, match=re.escape(str(file))):
            Result.read(file)


def test_any_flipped_bit_is_noticed(file, result):
    """Also one that turns a digit into another digit, which is good JSON of the right type."""
    whole, chooser = file.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        at = chooser.randrange(len(whole))
        damaged[at] ^= 1 << chooser.randrange(8)
        file.write_bytes(damaged)
        try:
            read = Result.read(file)
        except FileFormatError as error:
            assert str(file) in str(error)
        else:
            assert read == result  # white space between values


def test_an_edited_number_is_noticed(file):
    text = file.read_text()
    file.write_text(text.replace('"tokens": 512', '"tokens": 513', 1))
    with pytest.raises(FileFormatError, match="damaged or was edited"):
        Result.read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="quantize-state/result/7"), "reads version 1"),
        (lambda d: d.update(schema="another/thing/1"), "no file of this kind"),
        (lambda d: d.pop("schema"), "no schema"),
        (lambda d: d["arms"][3]["kl"].update(mean="small"), r'arms\[3\]\.kl\.mean is "small"; expected a number'),
        (lambda d: d["arms"][3]["kl"].update(mean=None), r"arms\[3\]\.kl\.mean is null"),
        (lambda d: d["arms"][3]["kl"].update(mean=True), r"arms\[3\]\.kl\.mean is true"),
        (lambda d: d["arms"][0]["kl"].pop("p999"), r"arms\[0\]\.kl lacks the key 'p999'"),
        (lambda d: d["arms"][0]["kl"].update(p99=1.0), r"arms\[0\]\.kl has the unknown key 'p99'; did you mean 'p999'"),
        (lambda d: d["arms"][0]["kl"].update(ci95=[1.0]), r"ci95 has 1 entries; expected 2"),
        (lambda d: d["model"]["layers"].update(gdn=2.5), r"model\.layers\.gdn is 2\.5; expected a whole number"),
        (lambda d: d.update(status="done"), "status is \"done\"; expected 'complete' or 'partial'"),
        (lambda d: d.update(arms={}), "arms is an object; expected a list"),
        (lambda d: d["arms"].append(d["arms"][0]), "two arms of one name"),
    ],
)
def test_wrong_content(file, change, message):
    rewrite(file, change)
    with pytest.raises(FileFormatError, match=message) as caught:
        Result.read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null", "[" * 100_000, b"\x80\x02}q\x00.", b"\xff\xfe{}"])
def test_not_a_result_at_all(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileFormatError):
        Result.read(path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_no_number_in_the_file(file, number):
    assert '"seconds": 12.5' in file.read_text()
    file.write_text(file.read_text().replace('"seconds": 12.5', f'"seconds": {number}', 1))
    with pytest.raises(FileFormatError):
        Result.read(file)


# writing


def test_nan_is_never_written(result, tmp_path):
    bad = dataclasses.replace(result, arms=[dataclasses.replace(result.arms[0], seconds=math.nan)])
    with pytest.raises(QuantizeStateError, match="NaN"):
        bad.write(tmp_path / "bad.json")
    assert list(tmp_path.iterdir()) == []


def test_never_overwritten_unless_asked(result, file):
    before = file.read_bytes()
    other = dataclasses.replace(result, status="partial")
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        other.write(file)
    assert file.read_bytes() == before
    other.write(file, overwrite=True)
    assert Result.read(file) == other
    assert [p.name for p in file.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file(result, file, monkeypatch, step):
    before = file.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(QuantizeStateError, match="No space left on device; the old file is unchanged"):
        dataclasses.replace(result, status="partial").write(file, overwrite=True)
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["result.json"]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60
    )


def test_a_disk_that_fills_up_while_writing(file):
    """The system itself refuses to write past 1,000 bytes."""
    before = file.read_bytes()
    done = run_python(
        """
        import resource, signal, sys
        from pathlib import Path
        from quantize_state.evals.records import write_atomic
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_atomic(Path(sys.argv[1]), "x" * 100_000, overwrite=True)
        except Exception as error:
            print(type(error).__name__, error)
        """,
        str(file),
    )
    assert "QuantizeStateError can't write" in done.stdout and "the old file is unchanged" in done.stdout, done
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == ["result.json"]


def test_a_process_killed_while_writing(file):
    before = file.read_bytes()
    done = run_python(
        """
        import os, signal, sys
        from pathlib import Path
        from quantize_state.evals import records
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        records.write_atomic(Path(sys.argv[1]), "new", overwrite=True)
        """,
        str(file),
    )
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == before


# runs


def test_a_run_from_start_to_end(result, tmp_path):
    with RunDirectory(tmp_path / "run", CONFIGURATION) as run:
        assert run.arms == {} and run.finished is None
        for arm in result.arms:
            run.save_arm(arm)
        path = run.finish(result)
    assert Result.read(path) == result
    assert not (tmp_path / "run" / ".lock").exists()


def test_an_interrupted_run_goes_on(result, tmp_path):
    with pytest.raises(KeyboardInterrupt), RunDirectory(tmp_path, CONFIGURATION) as run:
        run.save_arm(result.arms[0])
        run.save_arm(result.arms[1])
        raise KeyboardInterrupt
    with RunDirectory(tmp_path, dict(reversed(CONFIGURATION.items()))) as run:
        assert run.arms == {arm.name: arm for arm in result.arms[:2]}
        run.save_arm(result.arms[2])
        run.finish(result)


def test_another_configuration_is_refused_and_told(result, tmp_path):
    with RunDirectory(tmp_path, CONFIGURATION) as run:
        run.finish(result)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(QuantizeStateError, match=r"tokens was 4096, is 8192\); choose another --out"):
        RunDirectory(tmp_path, CONFIGURATION | {"tokens": 8192}).__enter__()
    assert (tmp_path / "result.json").read_bytes() == before


def test_a_finished_run_is_kept_and_can_only_grow(result, tmp_path):
    fewer = dataclasses.replace(result, arms=result.arms[:3])
    with RunDirectory(tmp_path, CONFIGURATION) as run:
        run.finish(fewer)
    with RunDirectory(tmp_path, CONFIGURATION) as run:
        assert run.finished == fewer
        with pytest.raises(QuantizeStateError, match="never overwritten"):
            run.finish(dataclasses.replace(result, arms=result.arms[3:]))
        run.finish(result)
    assert Result.read(tmp_path) == result


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(QuantizeStateError, match=r"not empty \(thesis\.tex\)"):
        RunDirectory(tmp_path, CONFIGURATION).__enter__()
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_killed_at_its_very_start_is_no_obstacle(tmp_path):
    (tmp_path / ".run.json.0a1b2c3d.tmp").write_text("{")
    with RunDirectory(tmp_path, CONFIGURATION) as run:
        assert run.arms == {}


@pytest.mark.parametrize("out", ["file/run", "/proc/quantize-state-run"])
def test_not_writable_is_said_before_any_work(tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantizeStateError, match=r"can't write into .*; choose another folder with --out"):
        RunDirectory(tmp_path / out, CONFIGURATION).__enter__()


def test_a_damaged_arm_is_named(result, tmp_path):
    with RunDirectory(tmp_path, CONFIGURATION) as run:
        run.save_arm(result.arms[0])
    (path,) = (tmp_path / "arms").iterdir()
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(FileFormatError, match=path.name):
        RunDirectory(tmp_path, CONFIGURATION).__enter__()
    StoredArm(result.arms[0], "another run").write(path)
    with pytest.raises(FileFormatError, match="belongs to another run"):
        RunDirectory(tmp_path, CONFIGURATION).__enter__()
    path.unlink()
    with RunDirectory(tmp_path, CONFIGURATION) as run:  # the lock was freed by each failure
        assert run.arms == {}


def test_two_runs_in_one_folder(tmp_path):
    with RunDirectory(tmp_path, CONFIGURATION):
        with pytest.raises(QuantizeStateError, match=f"in use by process {os.getpid()} on"):
            RunDirectory(tmp_path, CONFIGURATION).__enter__()
        assert (tmp_path / ".lock").exists()
    with RunDirectory(tmp_path, CONFIGURATION):
        pass


def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path):
    done = run_python(
        """
        import os, signal, sys
        from quantize_state.evals.rundir import RunDirectory
        RunDirectory(sys.argv[1], {"weights": "ab", "tokens": 4096, "window": 16}).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path),
    )
    assert done.returncode == -signal.SIGKILL and (tmp_path / ".lock").exists()
    with RunDirectory(tmp_path, CONFIGURATION):
        pass


def test_names_of_arms_and_models_never_leave_the_folder(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDirectory(fresh_folder("../../etc/<b>model</b>"), CONFIGURATION) as run:
        assert run.path.parent == Path("runs") and re.fullmatch(r"\d{8}-\d{6}-[\w.+-]+", run.path.name)
        for name in ("../../escape", "a/b", "a_b"):
            run.save_arm(dataclasses.replace(result.arms[0], name=name))
        assert len(list((run.path / "arms").iterdir())) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


# provenance


def test_provenance(tmp_path):
    record = collect(
        device="cpu", threads=2, dtype="float32", engine="scan", window=16, seeds={"text": 0}, sha256={}, started=now()
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.finished)
    assert record.versions["torch"][0].isdigit() and record.versions["python"][0].isdigit()
    assert git_state(tmp_path) == (None, None)
    (tmp_path / "weights").write_bytes(b"abc")
    assert sha256_of_files([tmp_path / "weights"])["weights"].startswith("ba7816bf")
