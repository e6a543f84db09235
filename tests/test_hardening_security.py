"""Nothing that comes with a model runs unless it is allowed to, and no name steers a page, a table or a terminal."""

import dataclasses
import json
import os
import pickle
import re
import shutil
import sys

import pytest
import torch
from fake_results import fake_result, renamed
from safetensors.torch import load_file

from quantize_state.cli import main
from quantize_state.evals.embedded import embedded_path
from quantize_state.evals.formatting import printable
from quantize_state.evals.models import load_model
from quantize_state.evals.report import render_html, render_markdown, write_reports
from quantize_state.evals.result import Result
from quantize_state.evals.table import markdown_table, print_table
from quantize_state.quant.errors import InvalidValueError

TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "EvilTokenizer"}
CONFIG = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}


class Mark:
    """Unpickling one of these leaves a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A copy of an embedded model, with a module in it that leaves a mark when it is imported; and that mark."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, mark = tmp_path / "model", tmp_path / "it ran"
    shutil.copytree(embedded_path("tiny-gdn"), folder)
    folder.joinpath("evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    return folder, mark


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("command", ["eval MODEL --tokens 32", "generate MODEL --prompt x"])
def test_code_in_a_model_directory_runs_with_the_flag_alone(model, command, capsys, monkeypatch):
    folder, mark = model
    monkeypatch.chdir(folder.parent)
    change(folder / "config.json", **CONFIG)
    arguments = [str(folder) if part == "MODEL" else part for part in command.split()]
    assert main(arguments) == 2
    assert "--trust-remote-code" in capsys.readouterr().err and not mark.exists()
    main([*arguments, "--trust-remote-code"])
    assert mark.exists(), "a check that can't fail: the code would not have run anyway"


@pytest.mark.parametrize("kind", ["config of a known type", "tokenizer", "generation", "template", "quantisation"])
def test_a_known_model_loads_without_the_code_beside_it(model, kind):
    folder, mark = model
    if kind == "config of a known type":
        change(folder / "config.json", auto_map=CONFIG["auto_map"])
    elif kind == "tokenizer":
        change(folder / "tokenizer_config.json", **TOKENIZER)
    elif kind == "generation":
        (folder / "custom_generate").mkdir()
        shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    elif kind == "template":
        (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    else:
        change(folder / "config.json", quantization_config={"quant_method": "evil"})
    load_model(str(folder), device="cpu")
    assert not mark.exists()


def test_a_repository_of_kernels_is_not_fetched(model):
    """transformers takes an attention implementation that looks like a repository for code to download and run."""
    folder, _ = model
    change(folder / "config.json", attn_implementation="someone/kernels@main")
    with pytest.raises(InvalidValueError, match=r"someone/kernels@main.* attn_implementation.*--trust-remote-code"):
        load_model(str(folder), device="cpu")
    change(folder / "config.json", attn_implementation="eager")
    load_model(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_are_weights_alone(model, name):
    folder, mark = model
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for write in (lambda p: torch.save({"x": Mark(mark)}, p), lambda p: p.write_bytes(pickle.dumps(Mark(mark)))):
        write(folder / name)
        with pytest.raises(InvalidValueError, match="can't load the model"):
            load_model(str(folder), device="cpu")
        assert not mark.exists()
    if name == "pytorch_model.bin":
        torch.save(weights, folder / name)
        assert load_model(str(folder), device="cpu").sha256


def test_recipes_are_data(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\ndefault: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    assert main(["generate", "tiny-gdn", "--recipe", str(recipe), "--prompt", "x"]) == 2
    assert not (tmp_path / "ran").exists() and "can't read the recipe" in capsys.readouterr().err


# ---- names


STEERING = "\x1b]0;owned\x07\x1b[31m\u202eevil\x00\r\x9b2J"
NOT_UTF8 = "caf\udce9"
"""As Python has the file name b'caf\\xe9'."""


def steered(result):
    arms = [dataclasses.replace(arm, name=f"{arm.name}{STEERING}{NOT_UTF8}") for arm in result.arms]
    return dataclasses.replace(
        renamed(result, STEERING + NOT_UTF8),
        arms=arms,
        text=dataclasses.replace(result.text, source=NOT_UTF8 + STEERING),
        provenance=dataclasses.replace(result.provenance, command=STEERING + NOT_UTF8, versions={STEERING: NOT_UTF8}),
    )


@pytest.fixture(scope="module")
def result():
    return fake_result(sequences=2, tokens=1024, layers=3)


def test_control_characters_are_spelled_out(result, capsys, tmp_path):
    odd = steered(result)
    path = tmp_path / "result.json"
    odd.write(path)
    assert Result.read(path) == odd, "the file keeps the name as it is"
    print_table(odd)
    shown = {
        "page": render_html(odd), "pages": render_html([odd, odd]), "markdown": render_markdown(odd),
        "markdowns": render_markdown([odd, odd]), "table": capsys.readouterr().out, "readme": markdown_table([path]),
    }  # fmt: skip
    for name, text in shown.items():
        assert printable(text) == text, name
        assert "evil" in text and text.encode(), name
    assert "\\x1b[31m\\u202eevil\\x00\\r" in shown["page"] and "caf\\udce9" in shown["page"]
    assert all(file.read_text(encoding="utf-8") for file in write_reports(odd, tmp_path / "report"))


def test_ordinary_names_are_shown_as_they_are(result):
    for name in ("Qwen3.5-4B", "modèle", "模型", "قاعدة", "a\tb\nc", "🙂", "$x$ & <b>"):
        assert printable(name) == name
    assert result.printable() == result


def test_errors_do_not_steer_the_terminal(capsys):
    assert main(["eval", f"no/such{STEERING}/model"]) == 2
    complaint = capsys.readouterr().err
    assert printable(complaint) == complaint and "evil" in complaint


def test_a_text_file_whose_name_is_no_utf8(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9.txt")
    try:
        with open(name, "w") as file:
            file.write("a text that is long enough " * 20)
    except OSError:
        pytest.skip("this file system has UTF-8 names alone")
    assert main(["eval", "tiny-gdn", "--text", name, "--tokens", "32", "--arms", "replay-fp32", "--out", "run"]) == 0
    assert Result.read("run").text.source == name
    assert not re.search("[\ud800-\udfff]", (tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
