"""capture, convert and inspect, as a user runs them."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, run, tokens

from quantize_state.adapters import attach
from quantize_state.cli import main
from quantize_state.evals.models import load_model
from quantize_state.evals.rollout import Rollout
from quantize_state.evals.text import load_text, tokenise
from quantize_state.kernels.step import folded
from quantize_state.quant import fake_quantize
from quantize_state.quant.inspection import inspect

TOLERANCES = {
    "capture": (1e-5, "float32 sums in another order, through six layers: 1.2e-6 measured"),
    "shares": (1e-9, "counts over counts in float64"),
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    path = tmp_path_factory.mktemp("captured") / "states.safetensors"
    assert main(["capture", "tiny-mamba2", "--tokens", "70", "--every", "32", "--out", str(path)]) == 0
    return path


def test_captured_states_are_the_models_own(captured):
    tensors = load_file(captured)
    loaded = load_model("tiny-mamba2", device="cpu")
    ids = torch.tensor(tokenise(loaded.tokenizer, load_text("pydoc").text, 65, 1, 0))
    with attach(loaded.model, "reference") as handle:
        rollout = Rollout(handle, "reference", "step")
        for at in (32, 64):
            rollout.advance(ids[:, at - 32 : at])
            held = handle.states(rollout.cache)
            assert len(held) == 6
            for name, state in held.items():
                got, want = tensors.pop(f"{name}@{at}"), folded(state)
                error = (got - want).norm() / want.norm()
                assert got.shape == (1, 8, 64, 128) and error < TOLERANCES["capture"][0]
    assert not tensors


def test_convert_by_format_by_recipe_and_back(captured, tmp_path, capsys):
    assert main(["convert", str(captured), "--format", "fp8", "--out", "fp8.safetensors"]) == 0
    assert "12 states (12 in fp8_e4m3), 3,145,728 bytes before, 811,008 after" in capsys.readouterr().out
    recipe = 'version: 1\ndefault: decoupled-nvfp4-four_over_six\nlayers: {"0": decoupled-int8}\n'
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["convert", str(captured), "--recipe", "recipe.yaml", "--out", "mixed.safetensors"]) == 0
    assert "2 in int8, 10 in nvfp4" in re.sub(r"\((10.*), (2.*)\)", r"(\2, \1)", capsys.readouterr().out)
    assert main(["convert", "mixed.safetensors", "--decode", "--out", "back.safetensors"]) == 0
    original, back = load_file(captured), load_file("back.safetensors")
    assert set(original) == set(back)
    first = next(iter(dict.fromkeys(name.partition("@")[0] for name in sorted(original))))
    for name, x in original.items():
        how = ("int8", "amax") if name.startswith(first) else ("nvfp4", "four_over_six")
        assert torch.equal(back[name], fake_quantize(x, *how)), name


def test_inspect_prints_what_it_computes(captured, tmp_path, capsys):
    main(["convert", str(captured), "--format", "nvfp4", "--rotation", "hadamard", "--out", "p.safetensors"])
    capsys.readouterr()
    assert main(["inspect", "p.safetensors", "--original", str(captured), "--plot"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "p.safetensors.png").stat().st_size > 10_000
    original = load_file(captured)
    for report in inspect("p.safetensors", captured):
        x = original[report.name]
        y = fake_quantize(x, "nvfp4", "amax", "hadamard")
        codes = load_file("p.safetensors")[f"{report.name}.codes"]
        magnitude = torch.stack([codes & 7, codes >> 4 & 7], -1).flatten(-2)
        for h, head in enumerate(report.heads):
            error = ((y - x)[:, h].double().norm() / x[:, h].double().norm()).item()
            assert head.amax == y[:, h].abs().max()
            assert head.error == pytest.approx(error, rel=1e-6)
            assert head.zeros == pytest.approx((magnitude[:, h] == 0).double().mean().item(), abs=1e-9)
            assert head.saturated == pytest.approx((magnitude[:, h] == 7).double().mean().item(), abs=1e-9)
            assert f"{head.error:.4g}" in out and f"{100 * head.zeros:.2f} %" in out
        assert sum(report.histogram) == pytest.approx(1, abs=TOLERANCES["shares"][0]) and len(report.codes) == 15
        assert report.histogram[7] == pytest.approx((magnitude == 0).double().mean().item(), abs=1e-9)


def test_inspect_of_plain_states_caches_and_json(captured, capsys, tmp_path):
    assert main(["inspect", str(captured), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert len(reports) == 12 and reports[0]["format"] == "f32" and reports[0]["heads"][0]["error"] is None
    _, cache = run(build("nemotron_h"), tokens(1, 12))
    torch.save(cache, "cache.pt")
    assert main(["inspect", "cache.pt"]) == 0
    assert "layers.0.recurrent_states.0" in capsys.readouterr().out


def test_a_copy_in_a_decode_state_file_is_compared_with_its_checkpoint(tmp_path):
    from test_packed import decode_states

    from quantize_state.quant import save_states

    states = decode_states()
    save_states(states, tmp_path / "s.safetensors")
    reports = {r.name: r for r in inspect(tmp_path / "s.safetensors")}
    x = states["layers.0"].checkpoint.decode()
    want = [((fake_quantize(x, "nvfp4") - x)[:, h].norm() / x[:, h].norm()).item() for h in range(4)]
    assert [h.error for h in reports["layers.0/copy"].heads] == pytest.approx(want, rel=1e-5)
    assert reports["layers.0/checkpoint"].error is None and reports["layers.0/checkpoint"].format == "fp32"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("convert nowhere.safetensors --format nvfp4 --out o", r"nowhere.safetensors does not exist"),
        ("convert text.txt --format nvfp4 --out o", r"text.txt is no safetensors file, or damaged"),
        ("convert raw.safetensors --format nvfp5 --out o", r"unknown format 'nvfp5'. Did you mean 'nvfp4'"),
        ("convert raw.safetensors --format int8 --scale-rule four_over_six --out o", r"int8 has no scale rule"),
        ("convert raw.safetensors --format nvfp4 --rotation hadmard --out o", r"Did you mean 'hadamard'"),
        ("convert raw.safetensors --format nvfp4 --tensors z* --out o", r"no state matches 'z\*'; there are x"),
        ("convert raw.safetensors --format nvfp4 --out text.txt", r"text.txt exists and is never overwritten"),
        ("convert raw.safetensors --decode --out o", r"raw.safetensors has schema None"),
        ("convert raw.safetensors --decode --layout kv --out o", r"--decode takes format, rule.* from the file"),
        ("convert cache.pt --format nvfp4 --out o", r"does not say how its states lie: give --layout kv"),
        ("convert evil.pkl --format nvfp4 --out o", r"plain pickle can run any code"),
        ("inspect raw.safetensors --original raw.safetensors", r"compared with a packed file, and this is none"),
        ("inspect raw.safetensors --plot raw.txt", r"raw.txt is no image"),
        ("capture tiny-gdn --tokens 8 --every 9 --out o", r"every is 9 and tokens 8"),
        ("capture tiny-gdn --out text.txt", r"text.txt exists and is never overwritten"),
    ],
)
def test_bad_input_is_one_clear_line(command, says, capsys, tmp_path):
    save_file({"x": torch.ones(2, 4, 16)}, "raw.safetensors")
    (tmp_path / "text.txt").write_text("no tensors")
    (tmp_path / "evil.pkl").write_bytes(b"\x80\x04.")
    torch.save({"layers": [{"recurrent_states": {0: torch.ones(1, 2, 4, 16)}}]}, "cache.pt")
    before = sorted(tmp_path.iterdir())
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(says, err), err
    assert sorted(tmp_path.iterdir()) == before, "something half-written was left"
