"""``quantize-state doctor``: what is installed, what the device is, which code would run and why."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

PACKAGES = (
    "quantize-state",
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "accelerate",
    "nvidia-modelopt",
    "lm-eval",
)

TRANSFORMERS_TESTED = ("5.16.1", "5.24")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("doctor", help="show versions, the device, and which kernels would run and why")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = examine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        table = Table(box=None, show_header=False, pad_edge=False)
        for section, entries in found.items():
            table.add_row(f"[bold]{section}[/bold]", "")
            for name, value in entries.items():
                table.add_row(f"  {name}", str(value))
        console.print(table, highlight=False)
    return 1 if found["problems"] else 0


def examine() -> dict[str, dict[str, str]]:
    """Versions, device, which code runs for each layer family, and what is wrong with this installation."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version()} | versions,
        "device": _device() if versions["torch"] != "missing" else {"device": "unknown: torch is missing"},
        "state code": _kernels(),
        "model types": _models(),
        "problems": _problems(versions),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _device() -> dict[str, str]:
    import torch

    found = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads for torch"}
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        found[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}, {memory:.0f} GiB"
    if not torch.cuda.is_available():
        found["cuda"] = "not available" + ("" if torch.version.cuda else ": this torch is a CPU build")
    return found


def _kernels() -> dict[str, str]:
    from ..quant.spec import FAMILIES

    reason = "torch reference, on any device: attach does not use the Triton kernels yet (see CHANGELOG.md)"
    return {family.title: reason for family in FAMILIES.values()}


def _models() -> dict[str, str]:
    try:
        from ..adapters import supported_model_types
    except ImportError as error:
        return {"unknown": f"transformers does not load: {error}"}
    return {family: ", ".join(types) or "none" for family, types in supported_model_types().items()}


def _problems(versions: dict[str, str]) -> dict[str, str]:
    problems = {
        name: "missing; `pip install quantize-state` brings it" for name in PACKAGES[:5] if versions[name] == "missing"
    }
    problems.pop("triton", None)  # needed on a GPU alone
    low, high = TRANSFORMERS_TESTED
    version = versions["transformers"]
    if version != "missing":
        number = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        if not (tuple(map(int, low.split("."))) <= number and number[:2] <= tuple(map(int, high.split(".")))):
            problems["transformers"] = f"{version} is outside the tested range {low} to {high}"
    return problems
