"""Reports: they say what the numbers say, escape what others named, load nothing, and need no torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_results import ARMS, fake_result, renamed

from quantize_state.cli.report import report
from quantize_state.evals import compare, formatting, table
from quantize_state.evals.report import render_html, render_markdown, write_reports
from quantize_state.evals.result import Arm, Result
from quantize_state.evals.verdict import judge, kind_of, separated
from quantize_state.evals.view import arm_rows, single
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{1}{2}$ {{ 7*7 }} | `x` \"'&"


@pytest.fixture(scope="module")
def result() -> Result:
    return fake_result(sequences=2, tokens=1024, layers=3)


@pytest.fixture(scope="module")
def page(result) -> str:
    return render_html(result)


def with_kl(result: Result, **sizes: tuple[float, float, float] | None) -> Result:
    """The result with (low, mean, high) of some arms' KL replaced; None removes the arm."""
    arms = []
    for arm in result.arms:
        key = arm.name.replace("-", "_")
        if key not in sizes:
            arms.append(arm)
        elif sizes[key] is not None:
            low, mean, high = sizes[key]
            arms.append(dataclasses.replace(arm, kl=dataclasses.replace(arm.kl, mean=mean, ci95=(low, high))))
    return dataclasses.replace(result, arms=arms)


# what the page is


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br", "img", "link", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


@pytest.mark.parametrize("several", [False, True])
def test_one_file_that_loads_nothing(result, page, several):
    if several:
        page = render_html([result, renamed(result, "tiny-kda")])
    parsed = outline(page)
    assert not {"script", "link", "iframe", "object", "embed", "img", "base", "form"} & set(parsed.tags)
    for tag, name, value in parsed.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="|url\()#([^")]+)', page):
        assert target in ids
    assert len(page) < 500_000


def test_every_colour_of_a_plot_is_one_of_the_page(page):
    used, defined = set(re.findall(r"var\((--[\w-]+)\)", page)), set(re.findall(r"(--[\w-]+):", page))
    assert used <= defined
    assert "#c0ff" not in page
    assert "DejaVu" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S)


def test_it_has_the_parts_it_promises(result, page):
    for heading in (
        "The arms",
        "KL against position",
        "KL against bytes moved",
        "Error per layer",
        "How this was measured",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert page.count('<svg viewBox="0 0 ') >= 8
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and "@media print" in page
    for text in (page, render_markdown(result)):
        shown = re.sub(r"<[^>]+>", "", text)
        assert "15 of 16 tokens" in shown
        assert "A divergence at or below it means nothing" in shown
        assert result.provenance.command in shown and result.model.sha256 in shown


def test_the_same_result_gives_the_same_page(result, page):
    assert render_html(result) == page


# escaping


def hostile(result: Result) -> Result:
    arms = [dataclasses.replace(arm, name=f"{arm.name}{HOSTILE}") for arm in result.arms[-2:]]
    layers = [dataclasses.replace(layer, name=HOSTILE, family=HOSTILE, policy=HOSTILE) for layer in arms[0].layers]
    arms[0] = dataclasses.replace(arms[0], layers=layers)
    named = renamed(result, HOSTILE)
    return dataclasses.replace(
        named,
        model=dataclasses.replace(named.model, layers={HOSTILE: 2}),
        text=dataclasses.replace(named.text, source=HOSTILE, protocol=HOSTILE),
        arms=arms,
        provenance=dataclasses.replace(named.provenance, command=HOSTILE, device=HOSTILE, versions={HOSTILE: HOSTILE}),
    )


@pytest.mark.parametrize("several", [False, True])
def test_names_are_shown_as_text(result, several):
    bad = hostile(result)
    page = render_html([bad, bad] if several else bad)
    parsed = outline(page)
    assert "script" not in parsed.tags and "img" not in parsed.tags
    assert not any(name.startswith("on") for _, name, _ in parsed.attributes)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7*7 }}" in page
    markdown = render_markdown([bad, bad] if several else bad)
    assert not re.search(r"(?<!\\)<", markdown)
    assert "\\`x\\`" in markdown
    for line in markdown.splitlines():
        if line.startswith("| decoupled"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 6, 9, 10)


def test_a_name_with_dollar_signs_is_no_formula_in_a_plot(result):
    odd = dataclasses.replace(result.arms[-1], name="$x_1$ $\\bad{$")
    page = render_html(dataclasses.replace(result, arms=[*result.arms[:-1], odd]))
    assert ">$x_1$ $\\bad{$</text>" in page


def test_a_name_of_several_lines_stays_in_its_cell(result):
    odd = dataclasses.replace(result, arms=[dataclasses.replace(result.arms[-1], name="a\n\n# b\n| c")])
    assert "| a \\# b \\| c |" in render_markdown(odd)


# the verdict


def test_it_says_how_many_times_less(result):
    verdict = judge(
        with_kl(
            result,
            decoupled_nvfp4=(2.1e-4, 2.4e-4, 2.8e-4),
            coupled_nvfp4=(0.1, 0.12, 0.13),
            coupled_nvfp4_w16=(2e-3, 2.4e-3, 3e-3),
        )
    )
    assert verdict.tone == "clear"
    assert "500 times less than coupled-nvfp4 (NVFP4 fed back every token)" in verdict.sentence
    assert "10 times less than coupled-nvfp4-w16 (NVFP4 fed back every 16 tokens)" in verdict.sentence
    assert "do not overlap" in verdict.facts[0]


def test_it_says_so_when_intervals_overlap(result):
    verdict = judge(with_kl(result, decoupled_nvfp4=(1e-3, 2e-3, 3e-3), coupled_nvfp4_w16=(2.5e-3, 4e-3, 6e-3)))
    assert verdict.tone == "open"
    assert "not to be told apart from coupled-nvfp4-w16" in verdict.sentence
    assert "overlap" in verdict.facts[0] and "do not" not in verdict.facts[0]


def test_it_says_so_when_the_copy_is_worse(result):
    verdict = judge(with_kl(result, decoupled_nvfp4=(0.01, 0.02, 0.03), coupled_nvfp4_w16=(1e-3, 2e-3, 3e-3)))
    assert verdict.tone == "against"
    assert "10 times more than coupled-nvfp4-w16" in verdict.sentence


def test_it_says_so_at_the_noise_floor_and_without_intervals(result):
    verdict = judge(with_kl(result, decoupled_nvfp4=(1e-12, 2e-12, 9e-12)))
    assert "noise floor itself" in verdict.sentence
    bare = dataclasses.replace(
        result, arms=[dataclasses.replace(a, kl=dataclasses.replace(a.kl, ci95=None)) for a in result.arms]
    )
    assert judge(bare).tone == "open" and "Too few tokens" in judge(bare).facts[0]
    assert "Too few tokens" in render_markdown(bare)


@pytest.mark.parametrize(("missing", "said"), [("decoupled", "no decoupled arm"), ("coupled-", "no coupled arm")])
def test_no_verdict_without_both_sides(result, missing, said):
    fewer = dataclasses.replace(result, arms=[a for a in result.arms if not a.name.startswith(missing)])
    assert said in judge(fewer).sentence
    assert said in render_markdown(fewer)


def test_a_run_without_layers_floor_or_positions(result):
    def bare(arm: Arm) -> Arm:
        return dataclasses.replace(arm, layers=[], ppl=None, kl=dataclasses.replace(arm.kl, by_position=[], mean=0.0))

    empty = dataclasses.replace(result, arms=[bare(result.arm("decoupled-nvfp4"))], status="partial")
    page = render_html(empty)
    assert "Error per layer" not in page and "Partial run" in page and "was not measured" in page
    assert "<svg viewBox" not in page
    render_html(dataclasses.replace(result, arms=[]))
    render_markdown(dataclasses.replace(result, arms=[]))


def test_kinds_come_from_policies():
    result = fake_result(sequences=1, tokens=64, layers=1)
    assert [kind_of(arm) for arm in result.arms] == [
        "reference",
        "floor",
        "replay",
        "coupled",
        "coupled",
        "coupled",
        "decoupled",
        "decoupled",
    ]


def test_rows_are_sorted_and_marked(result):
    rows = arm_rows(result)
    means = [result.arm(row["name"]).kl.mean for row in rows]
    assert means == sorted(means)
    assert [row["name"] for row in rows if row["subject"]] == ["decoupled-nvfp4"]
    notes = {row["name"]: row["note"] for row in rows}
    assert notes["reference-again"] == "at the noise floor" and notes["decoupled-nvfp4"] == ""
    assert single(result)["verdict"].subject == "decoupled-nvfp4"


# numbers


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (None, "–"), (2.4146e-4, "2.41 × 10⁻⁴"), (9.999e-4, "1.00 × 10⁻³"), (0.0995, "0.0995"),
        (0.1066, "0.107"), (0.9999, "1.00"), (1.0, "1.00"), (17.31, "17.3"), (409.4, "409"), (1234, "1.23 × 10³"),
        (5e-324, "4.94 × 10⁻³²⁴"), (1e300, "1.00 × 10³⁰⁰"),
    ],
)  # fmt: skip
def test_scientific(value, shown):
    assert formatting.scientific(value).replace("\u00a0", " ") == shown


def test_mean_and_interval_share_their_power():
    assert formatting.mean_text(2.41e-4, (2.14e-4, 2.72e-4)).replace("\u00a0", " ") == "2.41 (2.14–2.72) × 10⁻⁴"
    assert formatting.mean_text(9.996e-4, (9e-4, 1.2e-3)).replace("\u00a0", " ") == "1.00 (0.90–1.20) × 10⁻³"
    assert formatting.mean_text(0.107, (0.0984, 0.116)) == "0.107 (0.098–0.116)"
    assert formatting.mean_text(2e-4, None).replace("\u00a0", " ") == "2.00 × 10⁻⁴"
    assert formatting.mean_text(0.0, (0.0, 0.0)) == "0"


def test_other_numbers():
    assert formatting.percent(1.0) == "100.00 %" and formatting.percent(0.999999) == "99.99 %"
    assert [formatting.times(x) for x in (1.04, 1.5, 9.04, 12.34, 446.4, 12_345)] == [
        "1.04", "1.50", "9.0", "12", "446", "12,300"
    ]  # fmt: skip
    assert [formatting.tokens_axis(x) for x in (8, 512, 1024, 131072)] == ["8", "512", "1K", "128K"]


# several results


def test_a_comparison_pairs_only_the_same_model_on_the_same_text(result):
    again = dataclasses.replace(result, provenance=dataclasses.replace(result.provenance, engine="step"))
    assert [a.name for a, _ in compare.pair(result, again)] == [arm.name for arm in result.arms]
    page = render_html([result, again])
    assert "Ratio to" in page and "difference 0 (0 to 0): no clear difference" in page
    assert compare.labels([result, again]) == ["tiny-gdn, scan", "tiny-gdn, step"]
    assert compare.labels([result, result]) == ["tiny-gdn (1)", "tiny-gdn (2)"]

    other = dataclasses.replace(result, text=dataclasses.replace(result.text, sha256="00" * 32, source="stdlib"))
    with pytest.raises(InvalidValueError, match="can't be paired: their text differ"):
        compare.pair(result, other)
    markdown = render_markdown([result, other])
    assert "Side by side only, not paired" in markdown and "their text differ" in markdown
    assert "Ratio to" not in markdown and compare.view([result, other])["ratios"] == []


def test_paired_differences_see_what_separate_intervals_hide(result):
    """5 % more everywhere, on tokens whose divergence varies a hundredfold: the same tokens are hard for both."""
    more = fake_result(sequences=2, tokens=1024, layers=3, scale=1.05)
    for first, second in compare.pair(result, more):
        if first.kl.mean == 0:
            continue
        assert not separated(first, second), "a check that can't fail: their own intervals are apart already"
        mean, (low, high) = compare.difference(first, second)
        assert mean == pytest.approx(0.05 * first.kl.mean, rel=1e-6) and 0 < low < mean < high
        back, interval = compare.difference(second, first)
        assert (back, interval) == (pytest.approx(-mean), (pytest.approx(-high, rel=0.1), pytest.approx(-low, rel=0.1)))
    assert "): clear" in render_html([result, more]) and "): clear" in render_markdown([result, more])


def test_the_interval_of_a_difference_covers_it(result):
    """95 % of intervals of a true difference hold it; of 200 at least 180 (1 in 10,000 runs has fewer by chance)."""
    random = np.random.default_rng(5)
    arm = result.arms[-1]
    covered = 0
    for _ in range(200):
        base = [random.gamma(0.5, 1.0, 64) for _ in range(2)]
        shifted = [d + 0.1 + 0.3 * random.standard_normal(64) for d in base]
        arms = [
            dataclasses.replace(
                arm,
                kl=dataclasses.replace(
                    arm.kl, span=32, by_span=[d.tolist() for d in x], mean=float(np.concatenate(x).mean())
                ),
            )
            for x in (base, shifted)
        ]
        _, (low, high) = compare.difference(*arms)
        covered += low <= 0.1 <= high
    assert 180 <= covered <= 199


def test_older_results_are_compared_by_their_intervals(result):
    def old(r):
        return dataclasses.replace(
            r, arms=[dataclasses.replace(a, kl=dataclasses.replace(a.kl, span=0, by_span=[])) for a in r.arms]
        )

    assert compare.difference(old(result).arms[-1], result.arms[-1]) is None
    assert "intervals overlap" in render_html([old(result), result])


def test_a_comparison_of_runs_with_other_arms(result):
    fewer = dataclasses.replace(renamed(result, "tiny-kda"), arms=result.arms[:5])
    page = render_html([result, fewer])
    assert "<td>–</td>" in page
    render_markdown([fewer, result])


# files and commands


def test_reports_are_written_beside_the_result_and_again(result, tmp_path):
    result.write(tmp_path / "result.json")
    assert report([tmp_path / "result.json"]) == [tmp_path / "report.html", tmp_path / "report.md"]
    assert report([tmp_path], tmp_path / "deep" / "er", "md") == [tmp_path / "deep" / "er" / "report.md"]
    first = (tmp_path / "report.md").read_text()
    report([str(tmp_path)], format="md")
    assert (tmp_path / "report.md").read_text() == first


def test_bad_input_is_one_clear_error(result, tmp_path):
    (tmp_path / "result.json").write_text('{"schema": ')
    with pytest.raises(FileFormatError, match="not whole JSON"):
        report([tmp_path / "result.json"])
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    with pytest.raises(QuantizeStateError, match="can't write into"):
        write_reports(result, tmp_path / "result.json" / "below")
    with pytest.raises(InvalidValueError, match="no result"):
        render_html([])


WITHOUT_TORCH = """
    import sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "transformers", "triton", "scipy", "pandas"):
                raise ImportError(f"{name} is not to be imported for a report")

    sys.meta_path.insert(0, Refuse())
"""


def test_a_report_needs_no_torch(result, tmp_path):
    result.write(tmp_path / "result.json")
    code = textwrap.dedent(WITHOUT_TORCH) + textwrap.dedent("""
        from quantize_state.cli import main
        from quantize_state.evals import table, text, provenance, rundir
        from quantize_state.evals.result import Result
        table.print_table(Result.read(sys.argv[1]))
        sys.exit(main(["report", sys.argv[1]]))
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "decoupled-nvfp4" in done.stdout
    assert done.stdout.split()[-2:] == [str(tmp_path / "report.html"), str(tmp_path / "report.md")]


def test_console_table_shows_every_arm_and_no_markup(result, capsys):
    table.print_table(
        dataclasses.replace(result, arms=[*result.arms[:-1], dataclasses.replace(result.arms[-1], name="[bold]x")])
    )
    shown = capsys.readouterr().out
    assert "[bold]x" in shown and "99." in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_readme_block_is_rewritten_and_nothing_else(result, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{table.BEGIN}\nold\n{table.END}\n\nrest\n")
    result.write(tmp_path / "a.json")
    renamed(result, "tiny-kda").write(tmp_path / "b.json")
    arguments = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--readme", str(readme)]
    assert table.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{table.BEGIN}\n| model | arm |") and text.endswith(f"{table.END}\n\nrest\n")
    assert "old" not in text and "| tiny-kda |" in text and "**decoupled-nvfp4**" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(ARMS) and len({line.count("|") for line in rows}) == 1
    assert table.main(arguments) == 0 and readme.read_text() == text
    assert "up to date" in capsys.readouterr().out
    readme.write_text("no markers")
    assert table.main(arguments) == 2
    assert "must hold" in capsys.readouterr().err


def test_templates_travel_with_the_package():
    import quantize_state.evals.report as module

    names = {path.name for path in (Path(module.__file__).parent / "templates").iterdir()}
    assert {"base.html.j2", "report.html.j2", "compare.html.j2", "parts.html.j2", "report.md.j2", "style.css"} <= names


def test_errors_of_layers_are_short():
    shown = [formatting.error(e).replace("\u00a0", " ") for e in (0, 1.5e-7, 4e-4, 0.033, 0.44, 2.62, 248.4, 3e7)]
    assert shown == ["0", "1.5 × 10⁻⁷", "0.040 %", "3.3 %", "44 %", "262 %", "248×", "3.0 × 10⁷×"]
    assert formatting.spread([0.016, 0.033, 2e3]).replace("\u00a0", " ") == "3.3 % (1.6 %–2,000×)"
    assert formatting.spread([1e-7, 1.5e-7, 3e-7]).replace("\u00a0", " ") == "1.50 (1.00–3.00) × 10⁻⁷"
    assert formatting.spread([0.0, 0.0]) == "0"


def test_an_exact_first_window_does_not_stretch_the_axis(result):
    def exact_start(arm: Arm) -> Arm:
        first, *rest = arm.kl.by_position
        kl = dataclasses.replace(arm.kl, by_position=[dataclasses.replace(first, mean=3e-14), *rest])
        return dataclasses.replace(arm, kl=kl)

    arms = [exact_start(arm) if arm.name.startswith("decoupled") else arm for arm in result.arms]
    changed = render_html(dataclasses.replace(result, arms=arms))
    assert "A line that starts late" in changed and "10⁻¹³</text>" not in changed
    assert not single(result)["exact_start"]
