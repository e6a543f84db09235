"""``quantize-state export-flags``: what a serving engine can do of a policy, and what fits into memory."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..integrations.engines import Engine, Nearest, RequestBytes

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "export-flags",
        help="the flags of a serving engine for the nearest policy it has, and what fits into memory",
        description="Print the flags of vLLM, SGLang or TensorRT-LLM for the nearest policy that the engine supports, "
        "what it cannot do yet, and the bytes per request with the concurrency that fits. Needs a config, no weights.",
    )
    parser.add_argument("model", metavar="MODEL", help="an embedded model, a directory or config.json, or a hub id")
    parser.add_argument("--engine", required=True, choices=("vllm", "sglang", "tensorrt-llm"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policy", metavar="ARM", help="an arm name (default: the model's recipe, or decoupled-nvfp4)")
    which.add_argument("--recipe", type=Path, metavar="FILE", help="a YAML recipe: a policy per layer")
    parser.add_argument("--memory", default="80GiB", metavar="SIZE", help="of the device (default: %(default)s)")
    parser.add_argument("--weights", metavar="SIZE", help="what weights take of it (default: parameters in BF16)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens per request (default: 8192)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's directory run its own code")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.errors import InvalidValueError
    from ..quant.policy import parse_arm
    from ..quant.recipe import Recipe

    memory = parse_size("--memory", args.memory)
    weights = None if args.weights is None else parse_size("--weights", args.weights)
    if args.context < 1:
        raise InvalidValueError(f"--context is {args.context}; it must be 1 or more")
    recipe: Any = Recipe.from_yaml(args.recipe) if args.recipe else None
    if args.policy is not None:
        recipe = Recipe.of(parse_arm(args.policy))

    from ..adapters import resolve_recipe
    from ..adapters.shapes import request_shapes
    from ..evals.models import meta_model, resolve_source
    from ..integrations.engines import ENGINES, concurrency, nearest, request_bytes
    from ._options import quiet_transformers

    quiet_transformers()
    model = meta_model(args.model, trust_remote_code=args.trust_remote_code)
    if recipe is None:
        is_file = Path(args.model).is_file()
        found = resolve_recipe(str(Path(args.model).parent) if is_file else resolve_source(args.model))
        recipe = found if found is not None else Recipe.of(parse_arm("decoupled-nvfp4"))
    shapes = request_shapes(model)
    names = list(shapes.specs)
    asked = dict(zip(names, recipe.for_layers(names), strict=True))
    families = {name: spec.family for name, spec in shapes.specs.items()}
    if weights is None:
        weights = 2 * sum(p.numel() for p in model.parameters())
    engine = ENGINES[args.engine]
    best = nearest(engine, asked, families)
    sizes = {
        "engine": request_bytes(shapes, dict.fromkeys(names, best.policy), args.context),
        "asked": request_bytes(shapes, asked, args.context),
    }
    fits = {name: concurrency(memory, weights, size) for name, size in sizes.items()}
    if args.json:
        print(json.dumps(_plain(engine, best, sizes, fits, memory, weights, shapes.state_elements), indent=2))
        return 0
    counts: dict[str, int] = {}
    for family in families.values():
        counts[family] = counts.get(family, 0) + 1
    what = ", ".join(f"{count} {family}" for family, count in counts.items())
    named = ", ".join(dict.fromkeys(policy.name for policy in asked.values()))
    print(f"{args.model}: {what} layers, {shapes.state_elements:,} state elements per request")
    print(f"asked for: {named}\n")
    _show_flags(engine, best, str(Path(args.model).parent) if Path(args.model).is_file() else args.model)
    _show_memory(named, best, sizes, fits, memory, weights, args.context, shapes.state_elements)
    return 0


def parse_size(option: str, text: str) -> int:
    """Bytes of a size such as 80GiB, 141GB or 85899345920."""
    from ..quant.errors import InvalidValueError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    unit = "" if unit == "B" else unit if unit.endswith("B") or not unit else unit + "B"
    if match is None or unit not in UNITS:
        raise InvalidValueError(f"{option} is {text!r}; give a size such as 80GiB, 141GB or a number of bytes")
    return int(float(match[1]) * UNITS[unit])


def _show_flags(engine: Engine, best: Nearest, model: str) -> None:
    print(f"{engine.title}, nearest policy: {best.policy.name}")
    print(f"(flags as of {engine.title} {engine.version}, {engine.source})\n")
    launch = engine.launch.format(model=model)
    if engine.yaml:
        print(f"  {launch}\n\n  # FILE\n  kv_cache_config:")
        print("\n".join(f"    {flag}" for flag in best.flags))
    else:
        print(f"  {launch} \\\n    " + " \\\n    ".join(best.flags))
    if best.missing:
        print(f"\n{engine.title} {engine.version} can't do yet:")
        print("\n".join(f"- {missing}" for missing in best.missing))
    if best.notes:
        print("\nNotes:")
        print("\n".join(f"- {note}" for note in best.notes))


def _show_memory(
    named: str,
    best: Nearest,
    sizes: Mapping[str, RequestBytes],
    fits: Mapping[str, int],
    memory: int,
    weights: int,
    context: int,
    elements: int,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"bytes per request, {context:,} tokens")
    table.add_column(f"engine: {best.policy.name}", justify="right")
    table.add_column(f"asked: {named}", justify="right")
    for title, part in (
        (f"states, {elements:,} elements", "states"),
        ("ring", "ring"),
        ("convolutions, BF16", "convolution"),
        ("keys and values, BF16", "keys_values"),
        ("total", "total"),
    ):
        table.add_row(title, *(f"{getattr(sizes[who], part):,}" for who in ("engine", "asked")))
    table.add_row("requests at once", *(f"{fits[who]:,}" for who in ("engine", "asked")), style="bold")
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    print()
    console.print(table, highlight=False)
    print(
        f"\nrequests = ⌊(memory − weights) / total⌋ = ⌊({memory:,} − {weights:,}) / {sizes['engine'].total:,}⌋ "
        f"= {fits['engine']:,} with the engine's policy"
    )
    print("Without activations, CUDA graphs, paging and whatever else the engine keeps for itself.")


def _plain(
    engine: Engine,
    best: Nearest,
    sizes: Mapping[str, RequestBytes],
    fits: Mapping[str, int],
    memory: int,
    weights: int,
    elements: int,
) -> dict[str, Any]:
    import dataclasses

    return {
        "engine": engine.name,
        "engine_version": engine.version,
        "policy": best.policy.name,
        "flags": list(best.flags),
        "missing": list(best.missing),
        "notes": list(best.notes),
        "memory": memory,
        "weights": weights,
        "state_elements": elements,
        "bytes_per_request": {k: dataclasses.asdict(size) | {"total": size.total} for k, size in sizes.items()},
        "requests": dict(fits),
    }
