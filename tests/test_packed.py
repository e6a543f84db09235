"""Saved states packed into codes and scales, file to file, and back."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantize_state.quant import (
    FORMATS,
    DecodeState,
    LayerSpec,
    Recipe,
    encode,
    fake_quantize,
    load_states,
    save_states,
    tensorfile,
)
from quantize_state.quant.errors import FileFormatError, InvalidValueError, NonFiniteStateError, QuantizeStateError
from quantize_state.quant.packed import PackedFile, find_states, how_by_recipe, pack, unpack
from quantize_state.quant.tensorfile import Slot, TensorFile, writing

LIMITS = {
    # name: (bytes, why it is not less)
    "memory": (110 << 20, "a few copies of an 8 MiB piece while it is encoded, in float32, and the allocator's slack"),
}

NVFP4 = ("nvfp4", "amax", None)


def packed(path, out, how=NVFP4, patterns=(), **options):
    source = TensorFile(path)
    states = find_states(source, patterns)
    summary = pack(source, out, states, [how] * len(states) if isinstance(how, tuple) else how, **options)
    return summary, PackedFile(out)


def as_bytes(t):
    return t.reshape(-1).view(torch.uint8).tolist()


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and as_bytes(a) == as_bytes(b)


@pytest.fixture
def raw(tmp_path):
    g = torch.Generator().manual_seed(3)
    tensors = {
        "layer.0": torch.randn(2, 3, 24, 48, generator=g),
        "layer.1": torch.randn(5, 20, 40, generator=g).to(torch.bfloat16),
        "tile": torch.randn(8, 32, generator=g),
        "count": torch.arange(4),
    }
    save_file(tensors, tmp_path / "raw.safetensors", {"who": "somebody"})
    return tmp_path / "raw.safetensors", tensors


@pytest.mark.parametrize("rotation", [None, "hadamard"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_file_holds_what_encode_gives(raw, tmp_path, name, rotation):
    path, tensors = raw
    rotation = rotation if FORMATS[name].scaling else None
    _, file = packed(path, tmp_path / "out.safetensors", (name, "amax", rotation))
    stored = load_file(tmp_path / "out.safetensors")
    for key in ("layer.0", "layer.1", "tile"):
        want = encode(tensors[key], name, "amax", rotation)
        names = {
            "codes": "codes",
            "scales.row": "row_scale",
            "scales.block": "block_scale",
            "scales.global": "global_scale",
        }
        assert {f"{key}.{names[k]}" for k in want.tensors()} == {k for k in stored if k.startswith(key + ".")}
        for part, tensor in want.tensors().items():
            assert same(stored[f"{key}.{names[part]}"], tensor.contiguous())
        assert torch.equal(file.encoded(key).decode(), want.decode())
    assert torch.equal(stored["count"], tensors["count"])


def test_the_layout_that_other_programs_read(raw, tmp_path):
    path, tensors = raw
    packed(path, tmp_path / "out.safetensors")
    stored, x = load_file(tmp_path / "out.safetensors"), tensors["layer.0"]
    codes, block, total = (stored[f"layer.0.{part}"] for part in ("codes", "block_scale", "global_scale"))
    assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (2, 3, 24, 24))
    assert (block.dtype, tuple(block.shape)) == (torch.float8_e4m3fn, (2, 3, 24, 3))
    assert (total.dtype, tuple(total.shape)) == (torch.float32, (2, 3))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    pairs = np.stack([values[codes.numpy() & 15], values[codes.numpy() >> 4]], -1).reshape(2, 3, 24, 48)
    scale = (block.float() * total[..., None, None]).numpy().repeat(16, -1)
    assert np.array_equal(pairs * scale, fake_quantize(x, "nvfp4").numpy())
    metadata = TensorFile(tmp_path / "out.safetensors").metadata
    assert metadata["schema"] == "quantize-state/packed/1"
    assert json.loads(metadata["states"])["layer.1"] == {
        "tensor": "layer.1",
        "format": "nvfp4",
        "scale_rule": "amax",
        "rotation": None,
        "shape": [5, 20, 40],
        "dtype": "BF16",
        "layout": "vk",
    }


@pytest.mark.parametrize("piece", [1, 40_000, 8 << 20], ids=lambda n: f"piece of {n}")
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_decoding_gives_the_file_back_rounded(raw, tmp_path, layout, piece, monkeypatch):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    path, tensors = raw
    _, file = packed(path, tmp_path / "out.safetensors", ("nvfp4", "four_over_six", "hadamard16"), layout=layout)
    unpack(file, tmp_path / "back.safetensors")
    back = TensorFile(tmp_path / "back.safetensors")
    assert back.metadata == {"who": "somebody"} and set(back.slots) == set(tensors)
    for key, x in tensors.items():
        if key == "count":
            assert torch.equal(back.read(key), x)
            continue
        x32 = x.mT if layout == "kv" else x
        want = fake_quantize(x32, "nvfp4", "four_over_six", "hadamard16").to(x.dtype)
        assert torch.equal(back.read(key), want.mT if layout == "kv" else want), key


def decode_states(policy="decoupled-nvfp4", slots=3):
    from quantize_state.quant import parse_arm

    states = {}
    for i, family in enumerate(("mamba2", "gdn")):
        spec = LayerSpec(family, heads=4, key_heads=2, value_dim=24, key_dim=32)
        rate = -torch.ones(4) if family == "mamba2" else None
        state = DecodeState.allocate(spec, parse_arm(policy), slots, layer=f"layers.{i}", decay_rate=rate)
        g = torch.Generator().manual_seed(i)
        state.renew_(torch.randn(slots, 4, 24, 32, generator=g))
        state.ring["v"].normal_(generator=g)
        state.cursor += min(5, state.policy.window - 1)
        states[f"layers.{i}"] = state
    return states


def test_a_decode_state_file_stays_one(tmp_path):
    """Packed and unpacked, it loads again: rings and cursors as they were, copies made anew from the checkpoint."""
    states = decode_states()
    save_states(states, tmp_path / "states.safetensors")
    _, file = packed(tmp_path / "states.safetensors", tmp_path / "out.safetensors", ("fp8_e4m3", "amax", None))
    assert set(file.entries) == {"layers.0/checkpoint", "layers.1/checkpoint"}
    assert not any("/copy/" in name for name in file.file.slots)
    unpack(file, tmp_path / "back.safetensors")
    back = load_states(tmp_path / "back.safetensors")
    for name, state in states.items():
        want = fake_quantize(state.checkpoint.decode(), "fp8_e4m3")
        assert torch.equal(back[name].checkpoint.decode(), want)
        assert torch.equal(back[name].copy.decode(), fake_quantize(want, "nvfp4"))
        assert torch.equal(back[name].ring["v"], state.ring["v"]) and torch.equal(back[name].cursor, state.cursor)


def test_a_recipe_chooses_by_layer_and_leaves_low_precision_checkpoints_alone(tmp_path):
    states = decode_states() | {"layers.9": decode_states("coupled-int8")["layers.1"]}
    save_states(states, tmp_path / "states.safetensors")
    recipe = Recipe.from_dict({"default": "decoupled-nvfp4-hadamard", "layers": {"layers.1": "coupled-int8"}})
    source = TensorFile(tmp_path / "states.safetensors")
    found = find_states(source)
    how = how_by_recipe(found, recipe)
    assert [s.layer for s in found] == ["layers.0", "layers.1"]
    assert how == [("nvfp4", "amax", "hadamard"), ("int8", "amax", None)]
    pack(source, tmp_path / "out.safetensors", found, how)
    unpack(PackedFile(tmp_path / "out.safetensors"), tmp_path / "back.safetensors")
    back = load_states(tmp_path / "back.safetensors")
    assert torch.equal(back["layers.9"].checkpoint.decode(), states["layers.9"].checkpoint.decode())


def test_states_by_pattern(raw, tmp_path):
    path, _ = raw
    summary, file = packed(path, tmp_path / "out.safetensors", patterns=["layer.*"])
    assert set(file.entries) == {"layer.0", "layer.1"} and set(summary.kept) == {"tile", "count"}
    assert summary.states == {"nvfp4": 2} and summary.bytes_before == 2 * 3 * 24 * 48 * 4 + 5 * 20 * 40 * 2
    assert summary.bytes_after == sum(file.encoded(name).nbytes for name in file.entries)
    with pytest.raises(InvalidValueError, match=r"no state matches 'lair\*'; there are layer.0, layer.1, tile"):
        find_states(TensorFile(path), ["lair*"])


def test_bad_files_and_values_leave_nothing_behind(raw, tmp_path):
    path, tensors = raw
    out = tmp_path / "out.safetensors"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidValueError, match="no scale rule 'four_over_six'"):
        packed(path, out, ("int8", "four_over_six", None))
    save_file(tensors | {"layer.0": tensors["layer.0"].clone().index_fill_(0, torch.tensor(1), torch.nan)}, path)
    with pytest.raises(NonFiniteStateError, match=r"tensor 'layer.0': .* slot 1, head 0"):
        packed(path, out)
    with pytest.raises(InvalidValueError, match="layout 'vv'"):
        packed(path, out, layout="vv")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(FileFormatError, match="schema None"):
        PackedFile(path)
    save_file(tensors, path)
    packed(path, out)
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        packed(path, out)
    with pytest.raises(FileFormatError, match="packed already"):
        find_states(TensorFile(out))
    out.write_bytes(out.read_bytes()[:-7])
    with pytest.raises(FileFormatError, match="no safetensors file, or damaged"):
        PackedFile(out)
    with pytest.raises(InvalidValueError, match="does not exist"):
        TensorFile(tmp_path / "nowhere")


def test_a_header_that_contradicts_its_tensors_is_refused(raw, tmp_path):
    path, _ = raw
    packed(path, tmp_path / "out.safetensors")
    file = TensorFile(tmp_path / "out.safetensors")
    states = json.loads(file.metadata["states"])
    states["tile"]["shape"] = [8, 64]
    tensors = {name: file.read(name) for name in file.slots}
    save_file(tensors, tmp_path / "lie.safetensors", file.metadata | {"states": json.dumps(states)})
    with pytest.raises(FileFormatError, match=r"tile\.codes is not"):
        PackedFile(tmp_path / "lie.safetensors")


def test_a_writer_whose_data_do_not_fit_the_header(tmp_path):
    slots = {"a": Slot(torch.float32, (4,))}
    with pytest.raises(InvalidValueError, match="lacks 8 of its bytes"), writing(tmp_path / "x", slots, {}) as w:
        w.append("a", torch.zeros(2))
    with pytest.raises(InvalidValueError, match="more data"), writing(tmp_path / "x", slots, {}) as w:
        w.append("a", torch.zeros(5))
    with pytest.raises(InvalidValueError, match="float32 in the header"), writing(tmp_path / "x", slots, {}) as w:
        w.append("a", torch.zeros(4, dtype=torch.float64))
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_file(tmp_path):
    """250 MiB in one large tensor and many small ones; anonymous memory is sampled all the while."""
    code = """
    import sys, threading, time, torch
    from quantize_state.quant.packed import *
    from quantize_state.quant.tensorfile import *

    def anonymous():
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10

    folder, peak, stop = sys.argv[1], 0, False
    def sample():
        global peak
        while not stop:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    torch.set_num_threads(1)
    slots = {f"s.{i}": Slot(torch.float32, (16, 4, 128, 128)) for i in range(25)}
    slots["large"] = Slot(torch.float32, (600, 4, 128, 128))
    part = torch.randn(8, 4, 128, 128)
    with writing(f"{folder}/big", slots, {}) as w:
        for name, slot in slots.items():
            for _ in range(slot.shape[0] // 8):
                w.append(name, part)
    source = TensorFile(f"{folder}/big")
    states = find_states(source)
    start = anonymous()
    thread = threading.Thread(target=sample)
    thread.start()
    pack(source, f"{folder}/packed", states, [("nvfp4", "amax", "hadamard")] * len(states))
    unpack(PackedFile(f"{folder}/packed"), f"{folder}/back")
    stop = True
    thread.join()
    print(peak - start)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < LIMITS["memory"][0]
    for path in tmp_path.iterdir():
        path.unlink()
