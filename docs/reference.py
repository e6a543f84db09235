"""Write the API reference, HTML built from the docstrings: ``make docs``, or ``python docs/reference.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc

import quantize_state

MODULES = ("quantize_state", "quantize_state.adapters", "quantize_state.evals.result", "quantize_state.quant.errors")


def main(folder: str = "build/docs") -> int:
    for name in quantize_state.__all__:  # names load on first use, and pdoc looks at those that are there
        getattr(quantize_state, name)
    pdoc.render.configure(docformat="google", footer_text=f"quantize-state {quantize_state.__version__}", math=False)
    pdoc.pdoc(*MODULES, output_directory=Path(folder))
    print(Path(folder) / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
