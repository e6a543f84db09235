"""Switching the plugin on: which of vLLM's hooks are taken, and which policies layers made from then on get.

vLLM is not edited. Layer classes are replaced where vLLM allows it (``PluggableLayer.register_oot``), the Mamba-2
step through its backend registry; the calculators of state shapes and dtypes, and a few functions, are wrapped. Every
wrapper falls through to vLLM's own code where no policy is in force or the running layer has none.

The modules of vLLM's layers are imported with the first layer of theirs that is made, not when the plugin is loaded:
what a module is under CUDA graphs (``eager_break_during_capture``) is settled as it is imported, by what vLLM has found
out about the model until then.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, get_args

from ...kernels.paths import Path
from ...quant.errors import QuantizeStateError, unknown_name
from ...quant.policy import StatePolicy
from ...quant.recipe import Recipe
from . import checks
from .serving import (
    AUTO,
    check_patterns,
    check_servable,
    policies_of,
    policy_of,
    read_recipe,
    recipe_of_model,
    untouched,
)


class Plugin:
    """What is in force in this process: the recipe, once it is known, and the layers made under it."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.path: Path = "auto"
        self._recipe: Recipe | None = None

    def use(self, asked: str | StatePolicy | Recipe | None, path: Path = "auto") -> None:
        """Engines made from now on follow ``asked``; None leaves them to vLLM."""
        if path not in get_args(Path):
            raise unknown_name("path", path, get_args(Path))
        self._recipe, self.path = None, path
        if asked is None:
            self.asked = None
        elif isinstance(asked, str):
            self.asked = asked
            if asked != AUTO:
                self._recipe = read_recipe(asked)
        else:
            recipe = Recipe.of(asked)
            self.asked = recipe.default.name
            self._recipe = check_servable(recipe, self.asked)

    def resolve(self, model: str) -> None:
        """Read the recipe of ``model``, where ``auto`` asks for that."""
        if self.asked == AUTO and self._recipe is None:
            self._recipe = recipe_of_model(model)

    @property
    def recipe(self) -> Recipe | None:
        """What layers follow; None: nothing was asked for."""
        if self.asked is not None and self._recipe is None:
            raise QuantizeStateError("vLLM computes the size of a page before quantize-state knows the model's recipe")
        return self._recipe

    @property
    def policies(self) -> tuple[StatePolicy, ...]:
        """The different policies of the layers that vLLM's own code does not serve; empty where it serves all."""
        recipe = self.recipe
        return () if recipe is None else tuple(p for p in policies_of(recipe) if not untouched(p))

    def policy_of(self, prefix: str, index: int) -> StatePolicy | None:
        """The policy of a new layer, None where vLLM's own code does what it asks for."""
        recipe = self.recipe
        if recipe is None:
            return None
        policy = policy_of(recipe, prefix, index)
        return None if untouched(policy) else policy

    def check_layers(self, prefixes: list[str]) -> None:
        """Raise where the recipe names layers that the model, all of whose SSM layers these are, does not have."""
        if self._recipe is not None:
            check_patterns(self._recipe, prefixes)


LAYERS = {"MambaMixer2": "mamba2", "QwenGatedDeltaNetAttention": "gdn", "KimiGatedDeltaNetAttention": "kda"}
"""vLLM's layer classes, and the modules here that replace them."""

plugin = Plugin()
_hooked = False


def activate(asked: str | StatePolicy | Recipe | None, path: Path = "auto") -> None:
    """Take vLLM's hooks, once in a process, and let engines made from now on follow ``asked``, on a GPU by ``path``.

    Raises QuantizeStateError for a policy that can't be served, or a vLLM or device that the plugin does not know.
    """
    global _hooked
    checks.check_version()
    checks.check_platform()
    plugin.use(asked, path)
    if not _hooked:
        _take_hooks()
        _hooked = True


def _take_hooks() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.executor.abstract import Executor

    from . import calculators

    calculators.extend()
    # Before anything of the engine exists: what can't be served is refused here.
    wrap(VllmConfig, "__post_init__", _checked_config)
    wrap(MambaBase, "get_kv_cache_spec", _checked_layer)
    wrap(PluggableLayer, "__new__", _new_layer)
    wrap(Executor, "get_kv_cache_specs", _checked_workers)


def _new_layer(original: Callable[..., Any], layer_class: Any, *args: Any, **kwargs: Any) -> Any:
    if plugin.asked is not None and layer_class.__name__ in LAYERS:
        replace_layer(layer_class.__name__)
    return original(layer_class, *args, **kwargs)


@functools.cache
def replace_layer(name: str) -> None:
    """Have layers of vLLM's class ``name`` made by our subclass from now on."""
    from vllm.model_executor.custom_op import PluggableLayer

    module = importlib.import_module(f".{LAYERS[name]}", __package__)
    PluggableLayer.register_oot(module.LAYER, name=name)
    module.hook()


def _checked_config(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    if plugin.asked is not None and config.model_config is not None:
        plugin.resolve(config.model_config.model)
        checks.check_config(config, plugin)
    return original(config, *args, **kwargs)


def _checked_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if plugin.asked is not None:
        checks.check_layer(layer)
    return original(layer, *args, **kwargs)


def _checked_workers(original: Callable[..., Any], executor: Any) -> Any:
    if plugin.asked is not None:
        checks.check_workers(plugin, in_force(executor), executor.collective_rpc(in_force))
    return original(executor)


def in_force(process: Any) -> tuple[Recipe | None, Path]:
    """What layers follow in this process; ``process``: its worker, or the engine's executor."""
    plugin.resolve(process.vllm_config.model_config.model)
    return plugin.recipe, plugin.path


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, …)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
