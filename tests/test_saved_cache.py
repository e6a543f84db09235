"""Hugging Face caches saved by torch.save: read safely, and what else a pickle may hold is refused."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY, build, run, states, tokens

from quantize_state import attach
from quantize_state.adapters.saved_cache import STATES, SavedTensors
from quantize_state.quant import fake_quantize
from quantize_state.quant.errors import FileFormatError, InvalidValueError
from quantize_state.quant.packed import PackedFile, find_states, pack, unpack
from quantize_state.quant.tensorfile import TensorFile


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next", "kimi_linear"])
def test_states_of_a_cache_are_found_packed_and_come_back(name, tmp_path):
    """Every state, and keys, values and convolutions beside them, as transformers continues from them."""
    _, cache = run(build(name), tokens(2, 20))
    torch.save(cache, tmp_path / "cache.pt")
    source = SavedTensors(tmp_path / "cache.pt")
    layout = "vk" if FAMILY[name] == "mamba2" else "kv"
    found = find_states(source, [STATES])
    held = states(cache)
    assert [s.name for s in found] == [f"layers.{i}.recurrent_states.0" for i in held]
    pack(source, tmp_path / "packed", found, [("nvfp4", "amax", None)] * len(found), layout=layout)
    unpack(PackedFile(tmp_path / "packed"), tmp_path / "back")
    back = TensorFile(tmp_path / "back")
    for i, state in held.items():
        ours = state.mT if layout == "kv" else state
        want = fake_quantize(ours, "nvfp4")
        got = back.read(f"layers.{i}.recurrent_states.0")
        assert torch.equal(got.mT if layout == "kv" else got, want)
    keys = next(layer.keys for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor))
    assert any(torch.equal(back.read(n), keys) for n in back.slots if n.endswith(".keys"))


def test_a_cache_of_an_attached_model_holds_plain_states(tmp_path):
    model, ids = build("qwen3_next"), tokens(1, 20)
    _, plain = run(model, ids)
    with attach(model, "decoupled-nvfp4"):
        _, cache = run(model, ids)
        torch.save(cache, tmp_path / "cache.pt")
    source = SavedTensors(tmp_path / "cache.pt")
    for i, state in states(plain).items():
        got = source.read(f"layers.{i}.recurrent_states.0")
        assert got.shape == state.shape and torch.allclose(got, state, atol=1e-5)  # exact prefill, other summation


def test_nested_tensors_and_a_single_one(tmp_path):
    torch.save({"a": [torch.ones(2, 3), {"b": torch.zeros(4)}], "n": 7}, tmp_path / "nested.pt")
    assert set(SavedTensors(tmp_path / "nested.pt").slots) == {"a.0", "a.1.b"}
    torch.save(torch.ones(2, 3, 4), tmp_path / "one.pt")
    one = SavedTensors(tmp_path / "one.pt")
    assert one.read("tensor", slice(1, 2)).shape == (1, 3, 4)


def test_what_could_run_code_is_refused_and_does_not_run(tmp_path):
    trap = tmp_path / "trap"
    torch.save({"a": torch.ones(2), "evil": Evil(trap)}, tmp_path / "evil.pt")
    with pytest.raises(FileFormatError, match=r"evil.pt holds an object of \w+.mkdir, and is not read"):
        SavedTensors(tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"evil": Evil(trap)}))
    with pytest.raises(FileFormatError, match=r"no file of torch.save: a plain pickle can run any code"):
        SavedTensors(tmp_path / "evil.pkl")
    torch.save({"a": Path("x")}, tmp_path / "other.pt")
    with pytest.raises(FileFormatError, match=r"holds an object of pathlib\S*, and is not read"):
        SavedTensors(tmp_path / "other.pt")
    assert not trap.exists()


def test_damaged_missing_and_empty_files(tmp_path):
    torch.save({"a": torch.ones(1000)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:3000])
    with pytest.raises(FileFormatError, match="truncated or damaged"):
        SavedTensors(tmp_path / "cut.pt")
    with pytest.raises(InvalidValueError, match="does not exist"):
        SavedTensors(tmp_path / "nowhere.pt")
    torch.save({"a": 3}, tmp_path / "empty.pt")
    with pytest.raises(FileFormatError, match="holds no tensor"):
        SavedTensors(tmp_path / "empty.pt")
