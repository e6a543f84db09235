"""State files that are damaged, foreign, unreadable or half written; test_result.py does the same for results."""

import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import textwrap

import pytest
import torch
from hardening import bounded, fresh, inputs_for, same_state
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from quantize_state.kernels.step import scan
from quantize_state.quant import storage
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from quantize_state.quant.storage import load_states, save_states


@pytest.fixture(scope="module")
def states():
    found = {}
    for family, arm in (("gdn", "decoupled-nvfp4-w5"), ("mamba2", "coupled-int8-w5-sr")):
        found[family] = fresh(family, arm, 2)
        scan(found[family], inputs_for(family, 2, 7))
    return found


@pytest.fixture
def file(states, tmp_path):
    path = tmp_path / "state.safetensors"
    save_states(states, path)
    return path


def test_round_trip(states, file):
    loaded = load_states(file)
    assert loaded.keys() == states.keys()
    assert all(same_state(loaded[name], state) and loaded[name].layer == state.layer for name, state in states.items())
    os.truncate(file, 0)  # what was loaded does not live in the file
    assert all(same_state(loaded[name], state) for name, state in states.items())


def test_the_name_in_the_file_does_not_change_how_a_state_rounds(states, tmp_path):
    """Stochastic rounding is seeded by the layer's name in its model, whatever key it is saved under."""
    save_states({"another name": states["mamba2"]}, tmp_path / "s")
    (loaded,) = load_states(tmp_path / "s").values()
    original, more = states["mamba2"].clone(), inputs_for("mamba2", 2, 9, seed=1)
    assert torch.equal(scan(loaded, more), scan(original, more)) and same_state(loaded, original)


def test_truncated_anywhere(file):
    whole = file.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        file.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match=r"state\.safetensors"):
            load_states(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(FileFormatError):
        load_states(file)


def test_any_flipped_bit_is_noticed(file):
    """Also in the numbers themselves, which safetensors does not check."""
    whole = file.read_bytes()

    @given(st.integers(0, len(whole) * 8 - 1))
    @bounded(150)
    def check(bit):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(FileFormatError):
            load_states(file)

    check()


def rewritten(file, change):
    """The file again with ``change(tensors, layers, metadata)`` done and a checksum that fits."""
    from quantize_state.quant.storage import digest

    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    layers = json.loads(metadata["layers"])
    change(tensors, layers, metadata)
    metadata["layers"] = json.dumps(layers)
    metadata["sha256"] = digest(metadata["layers"], tensors)
    save_file({key: t.contiguous() for key, t in tensors.items()}, file, metadata)


CHANGES = {
    "another version": lambda t, layers, meta: meta.update(schema="quantize-state/state/99"),
    "no version": lambda t, layers, meta: meta.pop("schema"),
    "count past the ring": lambda t, layers, meta: t["gdn/cursor"].fill_(5),
    "count below zero": lambda t, layers, meta: t["gdn/cursor"].fill_(-1),
    "codes of another size": lambda t, layers, meta: t.update({"gdn/copy/codes": t["gdn/copy/codes"][..., :-1]}),
    "scales of another type": lambda t, layers, meta: t.update(
        {"gdn/copy/scales.global": t["gdn/copy/scales.global"].double()}
    ),
    "one slot less": lambda t, layers, meta: t.update({"gdn/ring/k": t["gdn/ring/k"][:1]}),
    "a tensor less": lambda t, layers, meta: t.pop("gdn/ring/g"),
    "a tensor more": lambda t, layers, meta: t.update({"gdn/ring/w": torch.zeros(2)}),
    "no cursor": lambda t, layers, meta: t.pop("gdn/cursor"),
    "no decay rate": lambda t, layers, meta: t.pop("mamba2/decay_rate"),
    "another window": lambda t, layers, meta: layers["gdn"]["policy"].update(window=7),
    "an unknown format": lambda t, layers, meta: layers["gdn"]["policy"].update(read="nvfp5"),
    "another format": lambda t, layers, meta: layers["gdn"]["encoded"]["copy"].update(format="mxfp4"),
    "another key dimension": lambda t, layers, meta: layers["gdn"]["encoded"]["copy"].update(key_dim=31),
    "another family": lambda t, layers, meta: layers["gdn"]["spec"].update(family="kda"),
    "more heads": lambda t, layers, meta: layers["gdn"]["spec"].update(heads=8),
    "a window of text": lambda t, layers, meta: layers["gdn"]["policy"].update(window="16"),
    "an unknown field": lambda t, layers, meta: layers["gdn"]["policy"].update(bits=4),
    "a layer that is a list": lambda t, layers, meta: layers.update(gdn=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_contradicts_itself(file, change):
    """With a checksum that fits: what another program, or an older version, may have written."""
    rewritten(file, CHANGES[change])
    with pytest.raises(FileFormatError, match=r"state\.safetensors|layer 'gdn'"):
        load_states(file)


def test_the_unchanged_file_would_have_been_read(file):
    rewritten(file, lambda t, layers, meta: None)
    assert load_states(file)


class Bomb:
    """Unpickling one of these leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def test_a_pickle_is_refused_and_never_run(tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "state.safetensors"
    for write in (lambda: path.write_bytes(pickle.dumps(Bomb(mark))), lambda: torch.save({"x": Bomb(mark)}, path)):
        write()
        with pytest.raises(FileFormatError, match="no state file"):
            load_states(path)
    assert not mark.exists()


def test_other_things_that_are_no_state_file(tmp_path):
    path = tmp_path / "file"
    for content in (
        b"", b"{}", b"\xff" * 100, struct.pack("<Q", 1 << 62) + b"{}", struct.pack("<Q", 99_000_000) + b"{" * 1000,
        struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 8) + b"[[[[[[[[",
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(FileFormatError):
            load_states(path)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(FileFormatError, match="schema None"):
        load_states(path)
    save_file({"x": torch.ones(1)}, path, {"schema": "quantize-state/state/2", "layers": "[" * 100_000, "sha256": ""})
    with pytest.raises(FileFormatError):
        load_states(path)
    with pytest.raises(InvalidValueError, match="does not exist"):
        load_states(tmp_path / "nothing")
    with pytest.raises(FileFormatError):
        load_states(tmp_path)


def test_unreadable_and_no_such_device(file):
    with pytest.raises(InvalidValueError, match="device"):
        load_states(file, device="gpu0")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidValueError, match="device"):
            load_states(file, device="cuda:0")
    file.chmod(0)
    if not os.access(file, os.R_OK):  # root may read everything
        with pytest.raises(FileFormatError):
            load_states(file)


def test_nowhere_to_write(states, tmp_path):
    (tmp_path / "file").write_text("kept")
    for target in (tmp_path / "no" / "folder", tmp_path / "file" / "below", tmp_path, "/proc/state"):
        with pytest.raises(QuantizeStateError, match="can't write"):
            save_states(states, target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up_leaves_the_old_file(states, file):
    """The limit on file sizes stands for the full disk."""
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        with pytest.raises(QuantizeStateError, match=r"can't write .*the old file is unchanged"):
            save_states(states, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == [file.name]


def test_an_interruption_while_writing_leaves_the_old_file(states, file, monkeypatch):
    before = file.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("quantize_state.quant.storage.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_states(states, file)
    assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_file_that_is_replaced_while_it_is_read(states, tmp_path, monkeypatch):
    """Between its description and its tensors, which are opened one after the other; a damaged one stays damaged."""
    path, real, calls = tmp_path / "state", storage.digest, []
    save_states(states, path)

    def replaced(*parts):
        calls.append(parts)
        if len(calls) == 1:
            save_states(states, path)
            return "of the file before"
        return real(*parts)

    monkeypatch.setattr(storage, "digest", replaced)
    assert load_states(path).keys() == states.keys() and len(calls) == 3
    monkeypatch.setattr(storage, "digest", lambda *parts: "of no file")
    with pytest.raises(FileFormatError, match="damaged"):
        load_states(path)


def test_two_processes_writing_one_file(tmp_path):
    """Whoever is last wins, and at every moment the file is whole."""
    code = textwrap.dedent(
        """
        import sys, torch
        from hardening import fresh
        from quantize_state.quant.storage import load_states, save_states
        state = fresh("gdn", "decoupled-fp8", 2)
        state.position.fill_(int(sys.argv[2]))
        for _ in range(15):
            save_states({"x": state}, sys.argv[1])
            assert int(load_states(sys.argv[1])["x"].position[0]) in (1, 2)
        """
    )
    path = tmp_path / "state"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(i)], env=environment, stderr=subprocess.PIPE)
        for i in (1, 2)
    ]
    for process in running:
        _, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint.decode()
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
