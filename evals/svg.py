"""A matplotlib figure as SVG that belongs to the page: its text is text, its colours are the page's CSS variables.

matplotlib wants real colours, so each CSS variable is drawn in a colour that stands for it and replaced in the
text of the SVG. One drawing then serves the light page, the dark page and print.
"""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

HEAT_STEPS = 10
_VARIABLES = (
    "ink",
    "muted",
    "line",
    "paper",
    "floor-0",
    "reference-0",
    "replay-0",
    "replay-1",
    *(f"{kind}-{i}" for kind in ("coupled", "decoupled") for i in range(4)),
    "other-0",
    "other-1",
    *(f"heat-{i}" for i in range(HEAT_STEPS)),
    *(f"set-{i}" for i in range(6)),
    "heat-ink-0",
    "heat-ink-1",
)
_STANDS_FOR = {name: f"#c0ff{i:02x}" for i, name in enumerate(_VARIABLES)}
_BACK = {stand: name for name, stand in _STANDS_FOR.items()}

RC = {
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.hashsalt": "quantize-state",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.2,
    "grid.linewidth": 0.6,
    "axes.labelpad": 6.0,
    "path.simplify": True,
    "text.parse_math": False,  # a model or arm named with dollar signs is a name
}


def css(name: str) -> str:
    """The colour to draw with where the page's variable ``--name`` is meant."""
    return _STANDS_FOR[name]


def new_figure(width: float, height: float) -> Any:
    """A figure of ``width`` × ``height`` CSS pixels; draw and render it inside ``drawing()``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), layout="constrained")


def drawing() -> Any:
    """The settings all figures share, as a context manager; the caller's own matplotlib settings stay as they are."""
    import matplotlib as mpl

    colours = {k: css("muted") for k in ("xtick.color", "ytick.color", "axes.edgecolor")}
    colours |= {k: css("ink") for k in ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")}
    settings: Any = RC | colours | {"grid.color": css("line")}
    return mpl.rc_context(settings)


def to_svg(figure: Any, name: str, title: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page; ids are prefixed by ``name``, ``title`` is its label."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"#c0ff[0-9a-f]{2}", lambda m: f"var(--{_BACK[m.group()]})", text)
    text = re.sub(r"font: (?:[a-z]+ |\d{3} )*([\d.]+px)[^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    box = re.search(r'viewBox="([^"]*)"', text)
    head = f'<svg viewBox="{box.group(1) if box else ""}" role="img" aria-label="{escape(title, quote=True)}">'
    text = head + text[text.index(">") + 1 :]
    text = re.sub(r'<g id="[^"]*(?:patch_1|figure_1)">', "<g>", text)
    text = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m.group()):.2f}", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()
