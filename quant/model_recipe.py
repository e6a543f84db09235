"""The recipe that travels with a model: ``state_quant_config.json`` in its directory (docs/states-on-disk.md).

Neither config.json nor ModelOpt's hf_quant_config.json has a place for states, so this is a file of its own, and
those stay as they are. Column scales, where the recipe has some, lie beside it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import FileFormatError, InvalidValueError
from .files import replacing
from .policy import CALIBRATE
from .recipe import Recipe

FILE_NAME = "state_quant_config.json"
COLUMNS_NAME = "state_quant_columns.safetensors"
SCHEMA = "quantize-state/model/1"


@dataclass(frozen=True)
class ModelRecipe:
    """A recipe, and what it comes to for the model that it was exported with.

    ``layers``: each SSM layer's policy as an arm name. ``unquantized``: those whose state stays exact FP32.
    ``unsupported``: layers with a recurrent state that no adapter knows, which therefore stays as it is.
    """

    recipe: Recipe
    layers: dict[str, str]
    unquantized: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    @property
    def left_out(self) -> str:
        """One sentence naming the layers that are not quantised; empty where all are."""
        parts = []
        if self.unquantized:
            parts.append(f"exact FP32 states in {', '.join(self.unquantized)}")
        if self.unsupported:
            parts.append(f"states that no adapter knows in {', '.join(self.unsupported)}")
        return f"not quantised: {'; '.join(parts)}" if parts else ""

    def write(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the file into a model's directory. Raises InvalidValueError where that is none, QuantizeStateError
        where the file exists and ``overwrite`` is False."""
        from .. import __version__

        folder = Path(directory)
        if not (folder / "config.json").is_file():
            raise InvalidValueError(f"{folder} is no model directory: it has no config.json")
        recipe = self.recipe
        if recipe.balanced and recipe.columns is None:
            raise InvalidValueError(f"the recipe needs column scales; {CALIBRATE}")
        if overwrite:
            (folder / COLUMNS_NAME).unlink(missing_ok=True)
        if recipe.columns is not None:
            recipe = replace(recipe, columns=recipe.columns.write(folder / COLUMNS_NAME))
        plain = {
            "schema": SCHEMA,
            "producer": {"name": "quantize-state", "version": __version__},
            "recipe": recipe.to_dict(),
            "layers": self.layers,
            "unquantized": list(self.unquantized),
            "unsupported": list(self.unsupported),
        }
        path = folder / FILE_NAME
        with replacing(path, overwrite=overwrite) as temporary:
            temporary.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelRecipe:
        """Read a state_quant_config.json. Raises FileFormatError where it is damaged or of another version."""
        try:
            plain: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise FileFormatError(f"can't read {path}: {error}") from error
        found = plain.get("schema") if isinstance(plain, dict) else None
        if found != SCHEMA:
            raise FileFormatError(f"{path} has schema {found!r}; this version of quantize-state reads {SCHEMA!r}")
        try:
            return cls(
                Recipe.from_dict(plain["recipe"], Path(path).parent),
                {str(name): str(policy) for name, policy in plain["layers"].items()},
                tuple(plain.get("unquantized", ())),
                tuple(plain.get("unsupported", ())),
            )
        except (KeyError, TypeError, AttributeError, InvalidValueError) as error:
            raise FileFormatError(f"{path} is damaged: {type(error).__name__}: {error}") from error
