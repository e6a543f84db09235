"""How much faster the scan evaluates a text than stepping through it, on this machine.

    python -m quantize_state.evals.speed.scan_ratio tiny-gdn --tokens 16384 [--arm decoupled-nvfp4] [--json]

Both run the same arm over the same tokens, the whole model included. Stepping costs the same at every token (its
state does not grow; the embedded models' attention does, a little), so --step-tokens may time a part of the text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...quant.errors import InvalidValueError, QuantizeStateError


def scan_against_step(model: str, tokens: int, arm: str, step_tokens: int | None = None) -> dict[str, Any]:
    """Seconds per token of both engines over held-out text, and their ratio. Raises QuantizeStateError."""
    import torch

    from ...adapters import attach
    from ...quant.policy import parse_arm
    from .. import provenance
    from ..attention import bounded_attention
    from ..models import load_model
    from ..rollout import Rollout, chunks
    from ..text import load_text, tokenise

    step_tokens = tokens if step_tokens is None else step_tokens
    if not 1 <= step_tokens <= tokens:
        raise InvalidValueError(f"--step-tokens is {step_tokens}; it must be 1 to --tokens, {tokens}")
    loaded = load_model(model)
    ids = torch.tensor(tokenise(loaded.tokenizer, load_text("pydoc").text, tokens + 1), device=loaded.model.device)
    seconds = {}
    on_gpu = loaded.model.device.type == "cuda"
    with bounded_attention(loaded.model), attach(loaded.model, parse_arm(arm), path="replay") as handle:
        for engine, count in (("scan", tokens), ("step", step_tokens)):
            # not timed: on a GPU kernels compile, some for the longest chunks alone
            warm = count if on_gpu and engine == "scan" else min(count, 64)
            for warming in (True, False):
                rollout = Rollout(handle, parse_arm(arm), engine)
                began = time.perf_counter()
                for _, inputs, _ in chunks(ids[:, : (warm if warming else count) + 1]):
                    rollout.advance(inputs)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds[engine] = time.perf_counter() - began
    scan, step = seconds["scan"] / tokens, seconds["step"] / step_tokens
    return {
        "model": model,
        "arm": arm,
        "tokens": tokens,
        "step_tokens": step_tokens,
        "scan_seconds_per_token": scan,
        "step_seconds_per_token": step,
        "ratio": step / scan,
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": provenance.command_line(),
        "time": provenance.now(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quantize_state.evals.speed.scan_ratio", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="an embedded model or a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N")
    parser.add_argument("--step-tokens", type=int, metavar="N", help="time only so many steps (default: all)")
    parser.add_argument("--arm", default="decoupled-nvfp4")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    os.environ.setdefault("GOMP_SPINCOUNT", "500")  # as the command line does, before torch loads
    try:
        found = scan_against_step(args.model, args.tokens, args.arm, args.step_tokens)
    except QuantizeStateError as error:
        print(f"scan_ratio: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for engine, count in (("scan", found["tokens"]), ("step", found["step_tokens"])):
            print(f"{engine}: {1e3 * found[f'{engine}_seconds_per_token']:.3f} ms per token over {count} tokens")
        print(f"the scan is {found['ratio']:.1f} times faster ({found['arm']}, {found['model']}, {found['device']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
