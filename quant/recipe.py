"""A policy per layer: one default and what differs from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .columns import ColumnScales
from .errors import FileFormatError, InvalidValueError, unknown_name
from .policy import StatePolicy, parse_arm

RECIPE_VERSION = 1

_POLICY_TYPES: dict[str, tuple[type, ...]] = {
    "checkpoint": (str,),
    "read": (str, type(None)),
    "window": (int,),
    "scale_rule": (str,),
    "rotation": (str, type(None)),
    "stochastic": (bool,),
    "seed": (int,),
    "balanced": (bool,),
}


@dataclass(frozen=True)
class Recipe:
    """Which policy each layer has.

    ``layers`` maps patterns to policies. A pattern is a layer's name as in ``model.named_modules()``, with the
    wildcards ``*``, ``?`` and ``[…]``, or the layer's number among the model's SSM layers, such as ``"0"``. Of
    several patterns that match a layer the last one counts, so that general ones come first. ``columns`` are the
    column scales of balanced policies.

    As YAML, a policy being an arm name or a mapping of StatePolicy's fields::

        version: 1
        columns: columns.safetensors  # beside the recipe; only for balanced policies
        default: decoupled-nvfp4-balanced-hadamard
        layers:
          "model.layers.1?.*": decoupled-fp8
          "0": {read: null, window: 16}
    """

    default: StatePolicy = field(default_factory=StatePolicy)
    layers: Mapping[str, StatePolicy] = field(default_factory=dict)
    columns: ColumnScales | None = None

    @property
    def balanced(self) -> bool:
        """Whether some policy needs column scales."""
        return any(policy.balanced for policy in (self.default, *self.layers.values()))

    def for_layer(self, name: str, index: int) -> StatePolicy:
        """The policy of the layer called ``name``, the ``index``-th SSM layer of its model."""
        policy = self.default
        for pattern, own in self.layers.items():
            if _matches(pattern, name, index):
                policy = own
        return policy

    def for_layers(self, names: Iterable[str]) -> list[StatePolicy]:
        """The policies of a model's SSM layers, given their names in order.

        Raises InvalidValueError naming every pattern that matches none of them.
        """
        names = list(names)
        lost = [p for p in self.layers if not any(_matches(p, name, i) for i, name in enumerate(names))]
        if lost:
            patterns = ", ".join(repr(p) for p in lost)
            raise InvalidValueError(
                f"no layer matches {patterns} of the recipe; the model's layers are {', '.join(names)}"
            )
        return [self.for_layer(name, i) for i, name in enumerate(names)]

    @classmethod
    def of(cls, policy: StatePolicy | Recipe | Mapping[str, Any] | str) -> Recipe:
        """A recipe from whatever spells one: a policy, an arm name, or the mapping that a YAML recipe holds."""
        if isinstance(policy, Recipe):
            return policy
        if isinstance(policy, Mapping):
            return cls.from_dict(policy)
        return cls(_read_policy(policy, "policy"))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], folder: Path = Path()) -> Recipe:
        """Read the mapping that a YAML recipe holds; ``version`` may be left out. Its file of column scales lies in
        ``folder``.

        Raises InvalidValueError naming the key or value that is not understood, FileFormatError for a damaged file.
        """
        if not isinstance(given, Mapping):
            raise InvalidValueError(f"a recipe is a mapping with version, default and layers, not {given!r}")
        _refuse_unknown("key in the recipe", given, ("version", "default", "layers", "columns"))
        if (version := given.get("version", RECIPE_VERSION)) != RECIPE_VERSION:
            raise InvalidValueError(f"recipe version {version!r}; this quantize-state reads version {RECIPE_VERSION}")
        layers = given.get("layers") or {}
        if not isinstance(layers, Mapping):
            raise InvalidValueError(f"layers of a recipe map patterns to policies, and are {layers!r}")
        return cls(
            default=_read_policy(given.get("default", StatePolicy()), "default"),
            layers={str(pattern): _read_policy(policy, f"layers[{pattern!r}]") for pattern, policy in layers.items()},
            columns=_read_columns(given.get("columns"), folder),
        )

    def to_dict(self) -> dict[str, Any]:
        """What ``from_dict`` reads back to this recipe; policies with a full arm name are written as that name.

        Raises InvalidValueError for column scales that are in no file yet.
        """
        return {
            "version": RECIPE_VERSION,
            **_write_columns(self.columns),
            "default": _write_policy(self.default),
            "layers": {pattern: _write_policy(policy) for pattern, policy in self.layers.items()},
        }

    @classmethod
    def from_yaml(cls, source: str | Path) -> Recipe:
        """Read YAML text, or the file at a Path, beside which its column scales lie (of text: in this folder).

        Raises FileFormatError for a file that can't be read or is no YAML mapping with a ``version``, and
        InvalidValueError naming what is not understood in it.
        """
        import yaml

        try:
            text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
            given = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            where = f" {str(source)!r}" if isinstance(source, Path) else ""
            raise FileFormatError(f"can't read the recipe{where}: {' '.join(str(error).split())}") from error
        if not isinstance(given, Mapping) or "version" not in given:
            raise FileFormatError(f"a recipe starts with 'version: {RECIPE_VERSION}', then default and layers")
        return cls.from_dict(given, source.parent if isinstance(source, Path) else Path())

    def to_yaml(self) -> str:
        """The recipe as YAML text, which ``from_yaml`` reads back."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def _matches(pattern: str, name: str, index: int) -> bool:
    return pattern == str(index) or fnmatchcase(name, pattern)


def _read_columns(given: Any, folder: Path) -> ColumnScales | None:
    """The column scales of a recipe: the name of a file in ``folder``, or its name and the hash that it must have."""
    if given is None:
        return None
    entry = {"file": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not {"file"} <= set(entry) <= {"file", "sha256"}:
        raise InvalidValueError(f"columns of a recipe name a file, or {{file: …, sha256: …}}, and are {given!r}")
    columns = ColumnScales.read(folder / str(entry["file"]))
    if "sha256" in entry and entry["sha256"] != columns.sha256:
        raise InvalidValueError(
            f"{columns.path} holds other column scales than those of the recipe: it has {columns.sha256}, and the "
            f"recipe says {entry['sha256']}. Put the recipe's own file there"
        )
    return columns


def _write_columns(columns: ColumnScales | None) -> dict[str, Any]:
    if columns is None:
        return {}
    if columns.path is None:
        raise InvalidValueError("the recipe's column scales are in no file; write them first: ColumnScales.write(PATH)")
    return {"columns": {"file": columns.path.name, "sha256": columns.sha256}}


def _read_policy(given: Any, where: str) -> StatePolicy:
    if isinstance(given, StatePolicy):
        return given
    if isinstance(given, str):
        return parse_arm(given)
    if isinstance(given, Mapping):
        _refuse_unknown(f"key in the recipe's {where}:", given, _POLICY_TYPES)
        for key, value in given.items():
            if not isinstance(value, _POLICY_TYPES[key]):
                raise InvalidValueError(f"{key} in the recipe's {where} is {value!r}")
        return StatePolicy(**given)
    raise InvalidValueError(f"{where} is {given!r}; a policy is an arm name or a mapping of StatePolicy's fields")


def _write_policy(policy: StatePolicy) -> str | dict[str, Any]:
    try:
        spelled = parse_arm(policy.name) == policy
    except InvalidValueError:
        spelled = False
    if spelled:
        return policy.name
    return {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) != f.default}


def _refuse_unknown(kind: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise unknown_name(kind, str(key), known)
