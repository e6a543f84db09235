"""``quantize-state convert``: saved states to packed codes and scales, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..quant.packed import Source

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="pack saved states into codes and scales, and decode them again",
        description="Quantise the states in a file (DecodeState files, captures, any safetensors file with tensors "
        "[..., V, K], a Hugging Face cache saved by torch.save) into packed codes and scales, a few megabytes at a "
        "time; --decode goes back. docs/states-on-disk.md describes the files.",
    )
    parser.add_argument("state", type=Path, metavar="STATE", help="a safetensors file, or one of torch.save")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write; must not exist")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--format", metavar="NAME", help="nvfp4, fp8, int8, … (see `quantize-state ls`)")
    which.add_argument("--recipe", type=Path, metavar="FILE", help="a YAML recipe: a format per layer")
    which.add_argument("--decode", action="store_true", help="decode a packed file to what it was made from")
    parser.add_argument("--scale-rule", default="amax", metavar="RULE", help="amax, four_over_six or mse")
    parser.add_argument("--rotation", metavar="NAME", help="hadamard or hadamard16, along K")
    parser.add_argument(
        "--tensors", action="append", default=[], metavar="PATTERN", help="only states of such names (repeatable)"
    )
    parser.add_argument(
        "--layout",
        choices=("vk", "kv"),
        help="how states lie: [..., V, K] (default), or [..., K, V] as in transformers' caches of GDN and KDA models; "
        "must be said for a cache",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.policy import FORMAT_ALIASES
    from ._progress import progress_bar

    if args.decode:
        from ..quant.packed import PackedFile, unpack

        _refuse_with_decode(args)
        with progress_bar("decoding", "bytes") as progress:
            summary = unpack(PackedFile(args.state), args.out, progress=progress)
        before, after = summary.bytes_after, summary.bytes_before
    else:
        from ..quant.formats import find_format
        from ..quant.packed import find_states, how_by_recipe, pack
        from ..quant.recipe import Recipe
        from ..quant.rotation import ROTATIONS

        how: list[Any] = []
        if args.format is not None:
            name = FORMAT_ALIASES.get(args.format, args.format)
            find_format(name, args.scale_rule)
            if args.rotation is not None and args.rotation not in ROTATIONS:
                from ..quant.errors import unknown_name

                raise unknown_name("rotation", args.rotation, ROTATIONS)
            how = [(name, args.scale_rule, args.rotation)]
        source, layout, patterns = open_source(args.state, args.layout, args.tensors)
        states = find_states(source, patterns)
        how = how * len(states) if how else how_by_recipe(states, Recipe.from_yaml(args.recipe))
        with progress_bar("packing", "bytes") as progress:
            summary = pack(source, args.out, states, how, layout=layout, progress=progress)
        before, after = summary.bytes_before, summary.bytes_after
    formats = ", ".join(f"{count} in {name}" for name, count in summary.states.items())
    print(f"{args.out}: {sum(summary.states.values())} states ({formats}), {before:,} bytes before, {after:,} after")
    if summary.kept:
        shown = ", ".join(summary.kept[:6]) + (", …" if len(summary.kept) > 6 else "")
        print(f"taken over as they are: {len(summary.kept)} other tensors ({shown})")
    return 0


def open_source(path: Path, layout: str | None, patterns: list[str]) -> tuple[Source, str, list[str]]:
    """What a file of states is, its layout, and the patterns of its states."""
    from ..quant.errors import InvalidValueError
    from ..quant.tensorfile import TensorFile

    if not is_torch_file(path):
        return TensorFile(path), layout or "vk", patterns
    from ..adapters.saved_cache import STATES, SavedTensors

    source = SavedTensors(path)
    cached = any("recurrent_states" in name for name in source.slots)
    if cached and layout is None:
        raise InvalidValueError(
            f"{path} is a transformers cache, which does not say how its states lie: give --layout kv for a model "
            "with GDN or KDA layers, --layout vk for one with Mamba-2 layers"
        )
    return source, layout or "vk", patterns or ([STATES] if cached else [])


def is_torch_file(path: Path) -> bool:
    """Whether a file is one of torch.save (or another pickle), by its name or its first bytes."""
    if path.suffix in TORCH_SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return file.read(2) == b"PK"
    except OSError:
        return False


def _refuse_with_decode(args: argparse.Namespace) -> None:
    from ..quant.errors import InvalidValueError

    if args.tensors or args.rotation or args.layout or args.scale_rule != "amax":
        raise InvalidValueError("--decode takes format, rule, rotation and layout from the file; give none of them")
