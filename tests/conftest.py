"""One torch thread for each test process, as pytest-xdist runs one per core; Triton's interpreter; which file first."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # counts only before Triton is first imported, by whatever test

import torch

torch.set_num_threads(1)

LONGEST = [
    "test_notebooks.py",
    "test_questions.py",
    "test_adapters.py",
    "test_adapters_identity.py",
    "test_compile.py",
    "test_balanced.py",
    "test_verify_kernels.py",
    "test_overflow.py",
    "test_team.py",
    "test_kernels.py",
    "test_assisted.py",
    "test_readout_many.py",
    "test_decode.py",
    "test_evaluate.py",
    "test_paths.py",
    "test_embedded.py",
    "test_weights.py",
]
"""Files of 20 s of CPU and more. A process takes a file at a time, so that one of these last would be waited for."""


def pytest_collection_modifyitems(items):
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def patch_the_language_once_a_launch():
    """Triton's interpreter patches ``triton.language`` anew at each call of a device function: a third of its time.

    What it sets is the same each time, so once per launch and module does, and the end of the launch takes it back.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, patched = getattr(interpreter, "_patch_lang", None), set()
    if patch is None:
        return

    def patch_once(fn):
        scope = interpreter._LangPatchScope()
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            scope = patch(fn)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())  # called for the kernel's own scope alone
        return scope

    interpreter._patch_lang = patch_once


patch_the_language_once_a_launch()
