"""Saving decode states and taking them up again, bit for bit, at any ring position (safetensors)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .codec import EncodedState
from .errors import FileFormatError, InvalidValueError
from .files import replacing
from .policy import StatePolicy
from .spec import LayerSpec
from .state import DecodeState

SCHEMA = "quantize-state/state/2"


def save_states(states: Mapping[str, DecodeState], path: str | os.PathLike[str]) -> None:
    """Write the states of a model's layers, by layer name, to one safetensors file.

    The file appears whole or not at all; an existing file is replaced only by a complete one. Raises
    QuantizeStateError where it can't be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for name, state in states.items():
        # clone: safetensors refuses tensors that share memory, as a decay rate may
        tensors |= {f"{name}/{key}": _plain(t) for key, t in _tensors(state).items()}
        layers[name] = {
            "layer": state.layer,  # of which stochastic rounding is seeded
            "spec": dataclasses.asdict(state.spec),
            "policy": dataclasses.asdict(state.policy),
            "encoded": {
                part: {"format": v.format, "scale_rule": v.scale_rule, "rotation": v.rotation, "key_dim": v.shape[-1]}
                for part, v in _encoded(state).items()
            },
        }
    described = json.dumps(layers)
    metadata = {"schema": SCHEMA, "layers": described, "sha256": digest(described, tensors)}
    with replacing(path, overwrite=True) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error  # newer versions of safetensors name the system's error in it alone


def _plain(t: Tensor) -> Tensor:
    """A contiguous copy on the CPU; ``contiguous`` alone would leave the strides of a tensor with one element."""
    return t.detach().cpu().clone(memory_format=torch.contiguous_format)


def load_states(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, DecodeState]:
    """Read what ``save_states`` wrote, all of it checked against the file's checksum and its own description.

    A file that is replaced meanwhile is read again: safetensors opens it twice, for what it says of itself and for its
    tensors. Raises FileFormatError where the file is not that, of another version, or damaged, and InvalidValueError
    where there is none, or no such device.
    """
    while True:
        version = _version(path)
        try:
            return _loaded(path, device)
        except FileFormatError:
            if _version(path) == version:
                raise


def _version(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """What tells a file from another that takes its place."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _loaded(path: str | os.PathLike[str], device: str) -> dict[str, DecodeState]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("schema") != SCHEMA:
                raise FileFormatError(
                    f"{path} has schema {metadata.get('schema')!r}; this version reads {SCHEMA!r}. "
                    "Continue with the version that wrote it, or start from the prompt again."
                )
            # clone: what is read must not change with the file
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a mapping
        if metadata["sha256"] != digest(metadata["layers"], tensors):
            raise FileFormatError(f"{path} is damaged: its contents don't fit its checksum. Copy it again.")
        states = {name: _state(name, entry, tensors) for name, entry in json.loads(metadata["layers"]).items()}
    except FileNotFoundError:
        raise InvalidValueError(f"{path} does not exist; save_states writes such files") from None
    except FileFormatError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise FileFormatError(f"{path} is no state file, or damaged: {type(error).__name__}: {error}") from error
    try:
        return {name: state.to(device) for name, state in states.items()}
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise InvalidValueError(f"can't bring states to device {device!r}: {error}") from error


def _encoded(state: DecodeState) -> dict[str, EncodedState]:
    return {"checkpoint": state.checkpoint} | ({} if state.copy is None else {"copy": state.copy})


CONSTANT = ("decay_rate", "columns")
"""Tensors of a layer, not of its slots."""


def _tensors(state: DecodeState) -> dict[str, Tensor]:
    """Everything that a state holds, by name."""
    named = {f"{part}/{key}": t for part, value in _encoded(state).items() for key, t in value.tensors().items()}
    named |= {f"ring/{key}": t for key, t in state.ring.items()}
    named |= {"cursor": state.cursor, "position": state.position}
    columns = None if state.copy is None else state.copy.columns
    constants = {"decay_rate": state.decay_rate, "columns": columns}
    return named | {key: t for key, t in constants.items() if t is not None}


def _state(name: str, entry: dict[str, Any], tensors: dict[str, Any]) -> DecodeState:
    def under(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}

    columns = tensors.get(f"{name}/columns")
    encoded = {
        part: EncodedState.from_tensors(under(f"{name}/{part}/"), **header, columns=columns if part == "copy" else None)
        for part, header in entry["encoded"].items()
    }
    state = DecodeState(
        LayerSpec(**entry["spec"]),
        StatePolicy(**entry["policy"]),
        entry["layer"],
        checkpoint=encoded["checkpoint"],
        copy=encoded.get("copy"),
        ring=under(f"{name}/ring/"),
        cursor=tensors[f"{name}/cursor"],
        position=tensors[f"{name}/position"],
        decay_rate=tensors.get(f"{name}/decay_rate"),
    )
    _check(name, state)
    return state


def _check(name: str, state: DecodeState) -> None:
    """Raise FileFormatError where a state is not what its spec and policy describe."""
    empty = DecodeState.allocate(
        state.spec, state.policy, 1, layer=state.layer, dtype=state.ring["v"].dtype, decay_rate=state.decay_rate,
        columns=None if state.copy is None else state.copy.columns,
    )  # fmt: skip

    def layout(one: DecodeState) -> dict[str, tuple]:
        return {key: (t.dtype, *(t.shape if key in CONSTANT else t.shape[1:])) for key, t in _tensors(one).items()} | {
            part: (e.format, e.scale_rule, e.rotation, *e.shape[1:]) for part, e in _encoded(one).items()
        }

    ours, theirs = layout(state), layout(empty)
    wrong = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    counts = {key: len(t) for key, t in _tensors(state).items() if key not in CONSTANT}
    wrong += [key for key, count in counts.items() if count != state.slots]
    if wrong:
        raise FileFormatError(f"layer {name!r} has tensors that don't fit its description: {', '.join(wrong)}")
    counts_tokens = (state.cursor >= 0) & (state.cursor < state.policy.window)
    if not bool((counts_tokens | (state.cursor == state.emptied)).all()):
        raise FileFormatError(f"layer {name!r} has a ring of {state.policy.window} that claims to hold other counts")


def digest(described: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the description and every tensor's name, dtype, shape and bytes (contiguous, on the CPU)."""
    digest = hashlib.sha256(described.encode())
    for key in sorted(tensors):
        t = tensors[key]
        digest.update(f"\n{key} {t.dtype} {list(t.shape)}\n".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
