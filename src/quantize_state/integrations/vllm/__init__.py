"""A vLLM plugin: serve hybrid models with a read copy (docs/vllm.md).

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` and calls it in every process. Nothing heavy is
imported here: a plugin that fails to import is skipped by vLLM with no more than a log line, and the model would be
served as if no policy had been asked for.
"""

from __future__ import annotations

import os

VARIABLE = "QUANTIZE_STATE_POLICY"
"""An arm name, a recipe file, or ``auto`` for the recipe in the model's directory. Unset: vLLM stays as it is."""

PATH_VARIABLE = "QUANTIZE_STATE_PATH"
"""``auto`` (as without it), ``replay`` or ``standard``: what a step on a GPU runs; ``auto`` goes by the batch."""

RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""vLLM's list of variables that its processes on other machines are to have; they get no others but vLLM's own."""


def register() -> None:
    """Have vLLM keep states as ``QUANTIZE_STATE_POLICY`` says; without it, do nothing.

    Raises QuantizeStateError for a policy or path that can't be served, or a vLLM that the plugin was not tested with.
    """
    asked = os.environ.get(VARIABLE, "").strip()
    if asked:
        known = [*os.environ.get(RAY_VARIABLE, "").split(","), VARIABLE, PATH_VARIABLE]
        os.environ[RAY_VARIABLE] = ",".join(dict.fromkeys(filter(None, known)))
        from .plugin import activate

        activate(asked, os.environ.get(PATH_VARIABLE, "auto"))  # type: ignore[arg-type]
