"""Whole reports are, word for word, those that are kept: a number or sentence that changes shows.

If the change is meant, renew them: python -m compare.report results/demo, and GOLDEN by the command
in the test's message.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from PIL import Image
from rich.console import Console

from client import client, runs
from client.quoting import code, escape, named, unescape
from client.results import Result
from client.users import NAME, missing
from compare.deployments import OF_EACH
from compare.report import report
from compare.report.report import as_page
from compare.report.sections import measured_replicas
from compare.report.tables import markdown
from docs import quotes
from tests.compare.test_sweep import calm
from tests.programs import ran
from tests.servers import ROOT
from tests.stub import Handler, Stub, stub

VOID = ("meta", "img", "br", "hr")


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tables = 0
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = ("src", "href", "srcset", "data")
        self.sources += [value for name, value in attrs if name in named and value]
        self.tables += tag == "table"
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


GOLDEN = Path(__file__).parent / "report.md"
WORDS = (
    "--modes static,dynamic --replicas 2 --slow 1:2 --fail 0:0.4 --start-s 0.1 --repeats 2 "
    "--users ann,90,uniform:1:20 bob,30,uniform:5:60 --priorities 0.3:1 0.7:2 --numsamples 90 "
    "--goodput ttft:20 e2el:200 --price 2.5 --max-batch-size 4 --max-waiting 3"
)


def test_the_committed_report_is_what_its_data_say() -> None:
    folder = ROOT / "results" / "demo"
    assert report.contents(runs.load(folder)) == (folder / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_users_levels_and_replicas_is_what_it_was(tmp_path: Path) -> None:
    """In virtual time, so that its numbers are the same everywhere."""
    done = ran("simulate", *WORDS.split(), "--out", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr  # some requests are refused
    made = (tmp_path / "report.md").read_text().split("## How it was made")[0]
    assert made == GOLDEN.read_text(), f"./simulate.sh {WORDS} --out FOLDER, up to How it was made"


# ---- numbers on pages are those of the files that they name


@pytest.mark.parametrize("page", quotes.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_files_do(page: Path) -> None:
    text, differing = quotes.renewed(page.read_text())
    assert differing == [], "python -m docs.quotes --write"
    assert " ± " not in quotes.QUOTE.sub("", text), "an interval without the file it comes from"


PAGE = """\
Costs <!-- results/a.json#fronts/name=ray/seeds/*/ms:.1f -->{ms}<!-- end --> ms.

<!-- results/a.md#table 2 -->{table}<!-- end -->
"""


def test_numbers_unlike_files_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    seeds = {"plain": [{"ms": 9.0}], "ray": [{"ms": 1.0}, {"ms": 3.0}]}
    fronts = [{"name": name, "seeds": of} for name, of in seeds.items()]
    (tmp_path / "results" / "a.json").write_text(json.dumps({"fronts": fronts, "n": -0.5}))
    (tmp_path / "results" / "a.md").write_text("# a\n\n| x |\n\ntext\n\n| y |\n| --- |\n| 1 |\n")
    old = PAGE.format(ms="1.9 ± 12.7", table="| y |")
    new, differing = quotes.renewed(old)
    assert len(differing) == 2 and "fronts" in differing[0] and "table 2" in differing[1]
    assert new == PAGE.format(ms="2.0 ± 12.7", table="\n| y |\n| --- |\n| 1 |\n\n")
    assert quotes.renewed(new) == (new, [])
    assert quotes.quoted("results/a.json", "n:.2f") == "−0.50"
    two = "fronts/name=ray/seeds/*/ms {} fronts/name=ray/seeds/*/ms:.1f"
    found = [quotes.quoted("results/a.json", two.format(sign)) for sign in "÷−"]
    assert found == ["1.0 ± 0.0", "0.0 ± 0.0"]
    table = "| a | b | c |\n| --- | --- | --- |\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |\n"
    (tmp_path / "results" / "b.md").write_text(table)
    some = quotes.quoted("results/b.md", "table 1 columns c;a rows 7;5")
    assert some == "| c | a |\n| --- | --- |\n| 6 | 4 |"
    gone = new.replace("ms:.1f", "s:.1f")
    text, [sentence] = quotes.renewed(gone)
    assert text == gone and "KeyError" in sentence
    (tmp_path / "README.md").write_text(old)
    for argv, status in ([], 1), (["--write"], 0), ([], 0):
        with pytest.raises(SystemExit) as ended:
            quotes.main(argv)
        assert int(ended.value.code or 0) == status


# ---- what others say in their errors and names is text in a report, and nothing else


EVIL = "![x](http://evil/x.png) <img src=http://evil/y.png> [a](http://evil/b) `c` ``d`` | e_ _f_ "
EVIL += "**g** \\| &amp; $h$"


def rendered(text: str) -> Page:
    """As the most trusting of readers shows it."""
    return Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


@pytest.mark.parametrize(
    "text", [EVIL, "`", "``", "a`", "\\", "<b>", "", "~~x~~", "two\n\n# lines\x1b[31m"]
)
def test_quoted_text_is_shown_as_it_is_in_a_sentence_and_in_a_table(text: str) -> None:
    line = " ".join(text.replace("\x1b", " ").split())
    assert rendered(f"It said {escape(text)}.").text.strip() == f"It said {line}."
    assert unescape(escape(text)) == line
    cells, plain = (rendered(markdown([["a"], [each]])).text for each in (escape(text), "TEXT"))
    assert cells == plain.replace("TEXT", line)
    for page in (rendered(f"ran {code(text)}"), rendered(markdown([["a"], [code(text)]]))):
        assert page.sources == []


class Evil(Handler):
    def _stream(self, stub: Stub, tokens: int) -> None:
        if tokens == 9:
            self._whole(500, {"error": {"message": EVIL}})
        else:
            super()._stream(stub, tokens)


def test_replicas_that_were_measured_are_a_table() -> None:
    numbers = {"by_replica": {"a|b": dict.fromkeys((key.name for key in OF_EACH), 1)}}
    results = [{"static": Result(server=numbers), "vllm": Result()}] * 2
    summary = {"seed": 7, "variants": {"static": calm(), "vllm": calm()}}
    for n, seed in ((1, []), (2, ["By replica, seed 7:"])):
        run = runs.SavedRun(Path(), [summary] * n, results[:n], [])
        heading, _, *middle, table = measured_replicas(run)
        assert heading == "## Replicas" and middle == seed
        [row] = table.splitlines()[2:]
        assert row == r"| static | a\|b | 1 | 1 | 1 | 100 | 100 | 1 | 1 | 1.00 |"
    assert measured_replicas(runs.SavedRun(Path(), [summary], [{"vllm": Result()}], [])) == []


def test_a_report_fetches_nothing_that_a_servers_errors_and_names_ask(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stub(models=(f"{EVIL}/..{EVIL.replace('/', '')}",)) as server:
        server.RequestHandlerClass = Evil
        words = "--api openai --numsamples 6 --lengths choice:3,9 --arrival burst --quiet"
        places = ["--out", str(out), "--figure", str(tmp_path / "figure.png")]
        arguments = client.parse([*words.split(), *places])
        result = client.load(server.url, arguments, Console(file=io.StringIO()))
    assert 0 < result.failed < 6 and NAME.fullmatch(str(result.variant))
    page = Page((out / "report.html").read_text())
    assert {source[:26] for source in page.sources} == {"data:image/svg+xml;base64,"}
    text = rendered((out / "report.md").read_text())
    assert set(text.sources) <= {f"{name}.png" for name in runs.FIGURES}
    reason = f"× 500: {EVIL}."
    assert reason in page.text and reason in text.text, "and their words are all there"
    run = runs.load(out)
    report.show(run, Console(file=(terminal := io.StringIO()), width=10_000))
    assert reason in terminal.getvalue(), "in a terminal without backslashes"
    with pytest.raises(runs.RunError, match=r"has no report: .* holds no run"):
        client.report(tmp_path)


def test_a_page_shows_its_own_figures_and_no_others() -> None:
    text = "# t\n\n![a](rows.png) ![b](http://evil/rows.png) [c](rows2.png) <http://evil>"
    page = Page(as_page(text, {"rows": b"<svg/>"}))
    assert [source[:14] for source in page.sources] == ["data:image/svg"]
    whole = as_page("# a <b> & c\n\n| mode |\n| --- |\n| <script>alert(1)</script> |\n", {})
    assert "<script>" not in whole and "<title>a &lt;b&gt; &amp; c</title>" in whole


@pytest.mark.extra
def test_a_report_and_its_figures_are_dark_where_the_system_is(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    white = (
        b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="99" height="99" fill="#fff"/></svg>'
    )
    (page := tmp_path / "report.html").write_text(as_page("# t\n\n![a](rows.png)", {"rows": white}))
    tab, brightest = opened(page.as_uri()), {}
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        with Image.open(io.BytesIO(tab.locator("img").screenshot())) as figure:
            brightest[scheme] = max(figure.convert("L").tobytes())
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(28, 28, 28)"}[scheme]
    assert brightest["light"] == 255 and abs(brightest["dark"] - 28) < 3, "the page's own colour"


def test_a_servers_name_is_a_file_name_too() -> None:
    assert named("gpt2-medium_1.5") == "gpt2-medium_1.5" and NAME.fullmatch(named("../a b|c$"))
    assert named("") == "model" and named("Summary") == "Summary-model"
    assert named("org/None") == "org-None" and named("NA") == "NA-model", "no missing value"
    values = "#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None"
    assert all(map(missing, [*values.split("|"), "n/a", "nan", "null"])), "of pandas 2.3"
    assert not any(map(missing, ("", "na", "N", "NAs", "nano", "none", None)))
