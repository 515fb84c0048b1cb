"""The playground in a real browser: Pyodide in Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from playground.build import MOST_BYTES, BuildError, build
from tests.playground.test_run import simulated
from tests.servers import wait_until

pytestmark = [pytest.mark.extra, pytest.mark.alone]  # a run in it takes a core

PATIENCE_S = 120  # Pyodide loads in seconds, and in a minute beside other tests


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    try:
        assert build(folder) < MOST_BYTES
    except BuildError as error:
        pytest.skip(str(error))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def comes_true(tab: Any, condition: str) -> None:
    wait_until(lambda: bool(tab.evaluate(condition)), PATIENCE_S, every_s=0.1)


DONE = "document.getElementById('state').textContent.includes('simulated in')"


def test_what_it_shows_is_equal_to_simulate_sh_and_needs_no_network_later(
    site: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    tab = opened(f"{site}#costs=gpt2&rate=5&requests=60&stream=1&v=static&v=dynamic+--order+sjf")
    comes_true(tab, DONE)
    comes_true(tab, "document.getElementById('live').className === 'known'")
    with tab.expect_download() as download:
        tab.click("#trace")
    download.value.save_as(trace := tmp_path / "trace.jsonl")
    answers = tab.evaluate("playgroundForTests.results.map((result) => result.answers)")
    assert len(answers[0]) == 60
    wanted = simulated(tab.inner_text("#command"), trace)
    assert [sorted(of_variant) for of_variant in answers] == wanted
    tab.evaluate("navigator.serviceWorker.ready.then(() => 0)")
    tab.context.set_offline(True)
    tab.reload()
    comes_true(tab, DONE)
    again = "playgroundForTests.results.map((result) => result.answers)"
    assert tab.evaluate(again) == answers


CODE = """from scheduling.policies.orders import Order%0A
class Mine(Order):%0A    def key(self, inference):%0A        return 1 / 0%0A""".replace("\n", "")


def test_a_policy_from_a_link_runs_by_a_click_alone_and_its_error_is_at_its_line(
    site: str, opened: Callable[..., Any]
) -> None:
    tab = opened(f"{site}#v=dynamic&v=dynamic+--order+yours.py:Mine&code={CODE}")
    comes_true(tab, DONE)
    assert tab.is_visible("#foreign") and "Run it" in tab.inner_text("#variants")
    assert "ZeroDivisionError" not in tab.inner_text("body")
    tab.click("#run")
    comes_true(tab, "document.querySelector('#lines .at')?.textContent === '4'")
    assert "ZeroDivisionError" in tab.inner_text("#wrong")
    tab.fill("#code", tab.input_value("#code").replace("1 / 0", "inference.id"))
    comes_true(tab, f"!document.getElementById('wrong').textContent && {DONE}")
    comes_true(tab, "playgroundForTests.results[1].answers?.length === 300")
