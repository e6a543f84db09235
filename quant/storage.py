"""Saving decode states and taking them up again, bit for bit, at any ring position (safetensors)."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .codec import EncodedState
from .errors import FileFormatError, InvalidValueError
from .policy import StatePolicy
from .spec import LayerSpec
from .state import DecodeState

SCHEMA = "quantize-state/state/1"


def save_states(states: Mapping[str, DecodeState], path: str | os.PathLike[str]) -> None:
    """Write the states of a model's layers, by layer name, to one safetensors file.

    The file appears whole or not at all; an existing file is replaced only by a complete one.
    """
    from safetensors.torch import save_file

    target = Path(path)
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for name, state in states.items():
        encoded = {"checkpoint": state.checkpoint} | ({} if state.copy is None else {"copy": state.copy})
        for part, value in encoded.items():
            tensors |= {f"{name}/{part}/{key}": t.contiguous() for key, t in value.tensors().items()}
        tensors |= {f"{name}/ring/{key}": t.contiguous() for key, t in state.ring.items()}
        tensors |= {f"{name}/cursor": state.cursor, f"{name}/position": state.position}
        if state.decay_rate is not None:
            tensors[f"{name}/decay_rate"] = state.decay_rate
        layers[name] = {
            "spec": dataclasses.asdict(state.spec),
            "policy": dataclasses.asdict(state.policy),
            "encoded": {
                part: {"format": v.format, "scale_rule": v.scale_rule, "rotation": v.rotation, "key_dim": v.shape[-1]}
                for part, v in encoded.items()
            },
        }
    metadata = {"schema": SCHEMA, "layers": json.dumps(layers)}
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        # clone: safetensors refuses tensors that share memory, as a decay rate may
        save_file({key: t.detach().cpu().clone() for key, t in tensors.items()}, temporary, metadata)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load_states(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, DecodeState]:
    """Read what ``save_states`` wrote. Raises FileFormatError where the file is not that, or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise FileFormatError(f"{path} has schema {metadata.get('schema')!r}; this version reads {SCHEMA!r}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: _state(name, entry, tensors) for name, entry in json.loads(metadata["layers"]).items()}
    except FileNotFoundError:
        raise InvalidValueError(f"{path} does not exist; save_states writes such files") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path} is no state file, or damaged: {type(error).__name__}: {error}") from error


def _state(name: str, entry: dict[str, Any], tensors: dict[str, Any]) -> DecodeState:
    def under(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}

    encoded = {
        part: EncodedState.from_tensors(under(f"{name}/{part}/"), **header) for part, header in entry["encoded"].items()
    }
    return DecodeState(
        LayerSpec(**entry["spec"]),
        StatePolicy(**entry["policy"]),
        name,
        checkpoint=encoded["checkpoint"],
        copy=encoded.get("copy"),
        ring=under(f"{name}/ring/"),
        cursor=tensors[f"{name}/cursor"],
        position=tensors[f"{name}/position"],
        decay_rate=tensors.get(f"{name}/decay_rate"),
    )
