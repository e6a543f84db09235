"""Results as a page and as Markdown. Loads without torch, so that a report renders on a laptop.

One result gives a report, several a comparison. Everything that comes from models, texts and files is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..quant.errors import InvalidValueError, QuantizeStateError
from . import compare, view
from .questions.result import QuestionsResult
from .questions.view import page as questions_page
from .records import write_atomic
from .result import Result

Format = Literal["html", "md", "both"]
_TEMPLATES = Path(__file__).parent / "templates"


def read_result(path: str | Path) -> Result | QuestionsResult:
    """A result of either kind, told by its schema. Raises FileFormatError as their ``read`` does."""
    file = Path(path) / "result.json" if Path(path).is_dir() else Path(path)
    try:
        schema = str(json.loads(file.read_bytes())["schema"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        schema = ""  # Result.read says what is wrong
    return QuestionsResult.read(file) if schema.startswith("quantize-state/questions/") else Result.read(file)


def render_html(results: Result | QuestionsResult | Sequence[Result]) -> str:
    """One self-contained HTML page: no script, nothing loaded from anywhere."""
    if isinstance(results, QuestionsResult):
        return _environment(html=True).get_template("questions.html.j2").render(page=questions_page(results))
    from . import plots  # matplotlib takes a second to load; Markdown does not need it

    several = _as_list(results)
    if len(several) == 1:
        drawn: dict[str, Any] = {name: _safe(plot) for name, plot in plots.single(several[0]).items()}
        return _environment(html=True).get_template("report.html.j2").render(page=view.single(several[0]), plots=drawn)
    comparison = compare.view(several)
    drawn = {name: _safe(plot) for name, plot in compare.plots(several).items()}
    return _environment(html=True).get_template("compare.html.j2").render(page=comparison, plots=drawn)


def render_markdown(results: Result | QuestionsResult | Sequence[Result]) -> str:
    """The same in Markdown, without plots."""
    if isinstance(results, QuestionsResult):
        return _environment(html=False).get_template("questions.md.j2").render(page=questions_page(results))
    several = _as_list(results)
    environment = _environment(html=False)
    if len(several) == 1:
        return environment.get_template("report.md.j2").render(page=view.single(several[0]))
    return environment.get_template("compare.md.j2").render(page=compare.view(several))


def write_reports(
    results: Result | QuestionsResult | Sequence[Result],
    directory: str | Path,
    *,
    format: Format = "both",
    overwrite: bool = True,
) -> list[Path]:
    """Write report.html and report.md into ``directory``; returns their paths.

    Reports are made from results and may be made again, so existing ones are replaced unless ``overwrite`` is False.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantizeStateError(f"can't write into {folder}: {error.strerror or error}") from error
    written = []
    for ending, render in (("html", render_html), ("md", render_markdown)):
        if format in (ending, "both"):
            path = folder / f"report.{ending}"
            write_atomic(path, render(results), overwrite=overwrite)
            written.append(path)
    return written


def markdown_text(value: object) -> str:
    """Any text as Markdown that shows it literally, also inside a table, and on one line."""
    line = re.sub(r"\s+", " ", str(value))
    return re.sub(r"([\\`*_{}\[\]<>|#&])", r"\\\1", line)


def _whole_names(value: object) -> Markup:
    """Escaped text in which names such as decoupled-nvfp4 are not broken across lines."""
    return Markup(
        re.sub(r"\b\w{2,20}(?:-\w{1,12}){1,3}\b", r'<span class="name">\g<0></span>', str(escape(str(value))))
    )


def _as_list(results: Result | Sequence[Result]) -> list[Result]:
    several = [results] if isinstance(results, Result) else list(results)
    if not several:
        raise InvalidValueError("no result to report")
    return [result.printable() for result in several]


def _safe(plot: Any) -> dict[str, Markup]:
    """Plots as markup: svg.py escapes their titles, and matplotlib the text in them."""
    return {"wide": Markup(plot.wide), "narrow": Markup(plot.narrow)}


def _environment(*, html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = markdown_text
    environment.filters["whole_names"] = _whole_names
    return environment
