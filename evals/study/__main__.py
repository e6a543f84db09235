"""python -m quantize_state.evals.study MODEL --tokens 131072 --out DIR

Runs the groups of the study one after another, each an ``evaluate`` of its own that resumes where it stopped, and
then writes DIR/study.md and DIR/study.html from their results. One FP32 pass for the error law comes first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...quant.errors import InvalidValueError, QuantizeStateError
from .grid import GROUPS, arms


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m quantize_state.evals.study", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("model", help="an embedded model or a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=131072, metavar="N")
    parser.add_argument("--protocol", choices=("held-out", "generated"), default="held-out")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="documents, as one batch")
    parser.add_argument("--groups", default=",".join(GROUPS), metavar="GROUP,…", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--full", action="store_true", help="every window and format with each other; many hours")
    parser.add_argument("--together", type=int, default=8, metavar="N", help="arms beside one reference")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", help="of weights and activations (default: float32)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--no-law", action="store_true", help="without the error law's pass")
    parser.add_argument("--report-only", action="store_true", help="only write the tables of what is there")
    args = parser.parse_args(arguments)
    os.environ.setdefault("GOMP_SPINCOUNT", "500")  # as the command line does, before torch loads
    try:
        groups = [g.strip() for g in args.groups.split(",") if g.strip()]
        for group in groups:
            if group not in GROUPS:
                raise InvalidValueError(f"unknown group {group!r}; there are {', '.join(GROUPS)}")
        out = Path(args.out)
        if not args.report_only:
            _run(args, groups, out)
        from .summary import write_summary

        for path in write_summary(out):
            print(path)
    except QuantizeStateError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace, groups: Sequence[str], out: Path) -> None:
    import torch

    from ...adapters import attach
    from ..attention import bounded_attention
    from ..error_law import predict
    from ..evaluate import evaluate, token_ids
    from ..models import load_model
    from ..text import load_text
    from .grid import reads
    from .summary import Law, LawEntry

    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    law_path = out / "law.json"
    if args.protocol == "held-out" and not args.no_law and not law_path.exists():
        law_path.parent.mkdir(parents=True, exist_ok=True)
        policies = reads() | arms("windows", full=args.full)
        with bounded_attention(loaded.model), attach(loaded.model, "reference", path="replay") as handle:
            ids = token_ids(loaded, load_text("pydoc"), args.tokens + 1, args.sequences, args.seed)
            found = predict(handle, ids[:, :-1], policies)
        Law(
            loaded.name,
            loaded.sha256,
            args.tokens,
            {
                arm: {layer: LawEntry(p.layer, p.normalised, p.heads) for layer, p in layers.items()}
                for arm, layers in found.items()
            },
        ).write(law_path)
    for group in groups:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        result = evaluate(
            loaded,
            arms(group, full=args.full),
            tokens=args.tokens,
            sequences=args.sequences,
            batch=args.sequences,
            generate=args.tokens if args.protocol == "generated" else 0,
            seed=args.seed,
            together=args.together,
            out=out / group,
        )
        seconds = sum(arm.seconds for arm in result.arms)
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if torch.cuda.is_available() else ""
        rate = len(result.arms) * result.tokens / seconds
        print(
            f"{group}: {len(result.arms)} arms, {seconds:.0f} s, {rate:,.0f} tokens a second and arm{peak}", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
