"""What others say in their errors and names is text in a report, and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from client import client
from client.users import NAME
from compare import runs
from compare.quoting import code, escape, named, unescape
from compare.report import report
from compare.report.page import as_page
from compare.report.tables import markdown
from tests.compare.pages import Page
from tests.stub import Handler, Stub, stub

EVIL = (
    "![x](http://evil/x.png) <img src=http://evil/y.png> [a](http://evil/b) `c` ``d`` | e_ _f_ "
    "**g** \\| &amp; $h$"
)


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


def test_a_report_fetches_nothing_that_a_servers_errors_and_names_tell_it_to(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with stub(models=(f"{EVIL}/..{EVIL.replace('/', '')}",)) as server:
        server.RequestHandlerClass = Evil
        words = "--api openai --numsamples 6 --lengths choice:3,9 --arrival burst --quiet"
        places = ["--out", str(out), "--figure", str(tmp_path / "figure.png")]
        arguments = client.parse([*words.split(), *places])
        result = client.load(server.url, arguments, Console(file=io.StringIO()))
    assert 0 < result["failed"] < 6 and NAME.fullmatch(result["variant"])
    page = Page((out / "report.html").read_text())
    assert {source[:26] for source in page.sources} == {"data:image/svg+xml;base64,"}
    text = rendered((out / "report.md").read_text())
    assert set(text.sources) <= {f"{name}.png" for name in runs.FIGURES}
    reason = f"× 500 {EVIL}."
    assert reason in page.text and reason in text.text, "and their words are all there"
    run = runs.load(out)
    report.show(run, Console(file=(terminal := io.StringIO()), width=10_000))
    assert reason in terminal.getvalue(), "in a terminal without backslashes"


def test_a_page_shows_its_own_figures_and_no_others() -> None:
    text = "# t\n\n![a](rows.png) ![b](http://evil/rows.png) [c](rows2.png) <http://evil>"
    page = Page(as_page(text, {"rows": b"<svg/>"}))
    assert [source[:14] for source in page.sources] == ["data:image/svg"]
    whole = as_page("# a <b> & c\n\n| mode |\n| --- |\n| <script>alert(1)</script> |\n", {})
    assert "<script>" not in whole and "<title>a &lt;b&gt; &amp; c</title>" in whole


def test_a_servers_name_is_a_file_name_too() -> None:
    assert named("gpt2-medium_1.5") == "gpt2-medium_1.5" and NAME.fullmatch(named("../a b|c$"))
    assert named("") == "model" and named("summary") == "summary-model"
