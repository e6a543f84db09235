"""Loading the model under evaluation: an embedded one, a local directory, or a hub id."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..quant.errors import InvalidValueError, QuantizeStateError, unknown_name
from .embedded import EMBEDDED, embedded_path
from .team import local_rank

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and what identifies its weights: the SHA-256 over the weight files."""

    name: str
    model: Any
    tokenizer: Any
    sha256: str


def resolve_device(device: str) -> torch.device:
    """The device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; under torchrun each process has a GPU of its own.

    Raises InvalidValueError where the device is not there.
    """
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return (
            torch.device("cuda", local_rank()) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else torch.device("cuda")
        )
    if device == "auto":
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InvalidValueError(f"device {device!r} is none that torch knows; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidValueError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return chosen


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load ``name`` for inference. ``device_map="auto"`` spreads it over all devices, in place of ``device``.

    Raises InvalidValueError where there is no such model, or it can't be loaded.

    Nothing that lies in the model's directory or repository is executed, and nothing that it names is fetched to be
    executed, unless ``trust_remote_code``; weights are safetensors, or pickles that torch reads as weights alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = resolve_device(device)
    if device_map is not None and device != "auto":
        raise InvalidValueError(f"--device {device} and --device-map {device_map} can't go together; leave one out")
    source = resolve_source(name)
    kind: Any = DTYPES[dtype] if dtype != "auto" else (torch.float32 if where.type == "cpu" else "auto")
    try:
        if not trust_remote_code:
            _refuse_kernels(AutoConfig.from_pretrained(source, trust_remote_code=False), name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=kind, device_map=device_map, trust_remote_code=trust_remote_code
        )
    except QuantizeStateError:
        raise
    except Exception as error:  # transformers raises many kinds; all mean that this name gives no model
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = "it brings code of its own, which runs with --trust-remote-code (trust_remote_code=True) alone"
        raise InvalidValueError(f"can't load the model {name!r} from {source}: {reason}") from error
    if device_map is None:
        model.to(where)
    model.eval().requires_grad_(False)
    return LoadedModel(name, model, tokenizer, weights_sha256(model, source))


def input_device(model: Any) -> torch.device:
    """Where token ids go: the device of the first weights that are on one (accelerate keeps some elsewhere)."""
    devices = (p.device for p in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _refuse_kernels(config: Any, name: str) -> None:
    """Raise InvalidValueError where a configuration names a repository of kernels for transformers to fetch and run."""
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _refuse_kernels(value, name)
        elif "implementation" in key and "/" in str(value):
            key = key.strip("_").removesuffix("_internal")
            raise InvalidValueError(
                f"the model {name!r} names {value!r} as its {key}, which would be fetched and run; "
                "take that line out of its config.json, or allow it with --trust-remote-code (trust_remote_code=True)"
            )


def meta_model(name: str, *, trust_remote_code: bool = False) -> Any:
    """The model of ``name``'s config without weights, on the meta device; ``name`` may be a config.json too.

    Raises InvalidValueError where there is no such model or config, or it can't be built.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = str(Path(name).parent) if Path(name).name == "config.json" else resolve_source(name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not trust_remote_code:
            _refuse_kernels(config, name)
        with torch.device("meta"):
            # bfloat16: grouped kernels of experts take nothing wider, not even without values
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
            )
            return model.eval()
    except QuantizeStateError:
        raise
    except Exception as error:  # as for load_model
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidValueError(f"can't build the model of {name!r} from its config: {reason}") from error


def resolve_source(name: str) -> str:
    """Where a model lies: the directory of an embedded one, a directory as it is, or a hub id. Raises
    InvalidValueError where there is none."""
    if name in EMBEDDED:
        return str(embedded_path(name))
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidValueError(f"{name} is no model directory: it has no config.json")
        return name
    if path.exists():
        raise InvalidValueError(f"{name} is a file; MODEL is an embedded name, a model directory or a hub id")
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return name  # a hub id, where the network allows
    raise unknown_name("model", name, EMBEDDED)


def weights_sha256(model: Any, source: str | None = None) -> str:
    """Over the weight files in the directory ``source``, in order of their names, or over the tensors themselves."""
    digest = hashlib.sha256()
    files = sorted(Path(source).glob("*.safetensors")) if source is not None else []
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    if not files:
        for key, value in sorted(model.state_dict().items()):
            digest.update(key.encode())
            digest.update(value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
