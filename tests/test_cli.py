"""The command line as users meet it: what it prints, and one clear line for every bad input."""

import json
import re
import subprocess
import sys

import pytest

from quantize_state.cli import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("eval tiny-gnd", r"unknown model 'tiny-gnd'. Did you mean 'tiny-gdn'"),
        ("eval tiny-gdn --arms decouple-nvfp4", r"unknown arm 'decouple-nvfp4'. Did you mean 'decoupled-nvfp4"),
        ("eval tiny-gdn --arms decoupled-nvfp8", r"'nvfp8'. Did you mean 'nvfp4'"),
        ("eval tiny-gdn --arms decoupled-nvfp4-w16-hadamrd", r"'hadamrd'. Did you mean 'hadamard'"),
        ("eval tiny-gdn --arms ,", r"--arms names no arm"),
        ("eval tiny-gdn --window 0", r"window is 0; it must be a whole number from 1 to 256"),
        ("eval tiny-gdn --window 257", r"window is 257"),
        ("eval tiny-gdn --arms decoupled-nvfp4-w300", r"window is 300"),
        ("eval tiny-gdn --tokens 0", r"tokens is 0"),
        ("eval tiny-gdn --tokens 100000000", r"the text gives [\d,]+ tokens, fewer than the 100,000,001 asked for"),
        ("eval tiny-gdn --generate -1", r"generate is -1"),
        ("eval tiny-gdn --text nowhere.txt", r"nowhere.txt does not exist"),
        ("eval tiny-gdn --text pydocs", r"unknown text 'pydocs'. Did you mean 'pydoc'"),
        ("eval tiny-gdn --recipe nowhere.yaml", r"nowhere.yaml"),
        ("eval tiny-gdn --recipe lost.yaml --tokens 32", r"no layer matches 'model.layers.99\*'.*layers are model"),
        ("eval tiny-gdn --recipe typo.yaml", r"(?s)'widnow'.*window"),
        ("eval tiny-gdn --device tpu9", r"device 'tpu9'"),
        ("eval tiny-gdn --out file.txt/run --tokens 32", r"can't write into file.txt/run"),
        ("eval empty", r"empty is no model directory: it has no config.json"),
        ("eval file.txt", r"file.txt is a file"),
        ("eval llama", r"LlamaForCausalLM has no layer with .* recurrence.*LlamaAttention.*Supported .*qwen3_next"),
        ("generate tiny-gdn --policy decoupled --prompt x", r"arm 'decoupled'"),
        ("generate tiny-gdn --prompt x --max-new-tokens 0", r"--max-new-tokens is 0"),
        ("generate tiny-gdn --prompt x --temperature -1", r"--temperature is -1"),
        ("generate tiny-gdn --prompt x --draft-tokens 3", r"--draft-tokens needs --assistant"),
        ("generate tiny-gdn --prompt x --assistant ngram --draft-tokens 0", r"--draft-tokens is 0"),
        ("generate tiny-gdn --prompt x --assistant tiny-gnd", r"unknown model 'tiny-gnd'"),
        ("report cut.json", r"cut.json is not whole JSON"),
        ("report nowhere.json", r"nowhere.json does not exist"),
        ("report other.json", r"other.json has .*schema"),
    ],
)
def test_bad_input_is_one_clear_line(command, says, capsys, tmp_path):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text('{"schema": "quantize-state/result/1", "arms": [')
    (tmp_path / "other.json").write_text('{"schema": "somebody/else/1"}')
    (tmp_path / "lost.yaml").write_text('version: 1\nlayers: {"model.layers.99*": decoupled-fp8}\n')
    (tmp_path / "typo.yaml").write_text("version: 1\ndefault: {read: nvfp4, widnow: 8}\n")
    if "llama" in command:
        _save_tiny_llama(tmp_path / "llama")
    before = sorted(tmp_path.rglob("*"))
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert re.search(says, err), err
    assert sorted(p for p in tmp_path.rglob("*") if p.name != ".lock") == before, "something half-written was left"


def _save_tiny_llama(path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantize_state.evals.models import load_model

    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(path)
    load_model("tiny-gdn", device="cpu").tokenizer.save_pretrained(path)


def test_eval_prints_a_table_and_writes_reports(capsys, tmp_path):
    command = "eval tiny-gdn --arms reference,decoupled-nvfp4,coupled-fp8 --tokens 48 --out run"
    assert main(command.split()) == 0
    out, err = capsys.readouterr()
    assert err == "", "quiet in a pipe"
    for word in ("decoupled-nvfp4", "coupled-fp8", "run/result.json", "run/report.html", "run/report.md"):
        assert word in out
    assert main([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "quantize-state/result/1"
    assert "<html" in (tmp_path / "run" / "report.html").read_text()


def test_generate_continues_the_prompt(capsys):
    assert main(["generate", "tiny-gdn", "--prompt", "The import", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The import") and len(out.rstrip("\n")) > len("The import")
    assert re.search(r"[1-9]\d* KiB of state", err)


@pytest.mark.parametrize("assistant", ["ngram", "tiny-mamba2"])
def test_generate_with_an_assistant_says_what_was_accepted(assistant, capsys):
    prompt = "import os\nimport sys\nimport os\nimport sys\nimport"
    command = ["generate", "tiny-gdn", "--prompt", prompt, "--max-new-tokens", "24", "--assistant", assistant]
    assert main([*command, "--draft-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(prompt)
    pattern = r"acceptance length (\d\.\d\d) tokens per step \((\d+) of (\d+) drafts accepted in (\d+) steps\)"
    found = re.findall(pattern, err)
    assert len(found) == 2 and "decoupled-nvfp4: acc" in err and "FP32 state: acc" in err, err
    for length, accepted, drafted, steps in found:
        assert int(steps) + int(accepted) + 1 == 24 and int(accepted) <= int(drafted) <= 4 * int(steps)
        assert abs(float(length) - (1 + int(accepted) / int(steps))) < 0.006
    assert "the same 24 tokens as plain decoding" in err


def test_ls_and_doctor(capsys):
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out
    for word in (
        "tiny-gdn",
        "tiny-kda",
        "tiny-mamba2",
        "nvfp4",
        "0.5625",
        "decoupled-nvfp4",
        "qwen3_next",
        "hadamard16",
    ):
        assert word in listed
    assert main(["ls", "--json"]) == 0
    assert {f["name"] for f in json.loads(capsys.readouterr().out)["families"]} == {"mamba2", "gdn", "kda"}
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == {} and "torch" in found["versions"]


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from quantize_state.cli import main\n"
        "try: main(['eval', '--help'])\n"
        "except SystemExit as done: sys.exit(done.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--generate" in done.stdout, done.stderr
