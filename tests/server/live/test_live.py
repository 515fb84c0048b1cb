"""GET /live: the page, its data, and the load that it starts."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from typing import Any

import pytest
from flask.testing import FlaskClient

from client.calls import get, post
from server.live import made_load, observer, page
from tests.server.live.shown import CASES, assert_stats_say, rows_of
from tests.servers import PATIENCE_S, ClientOf, started, wait_until

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
until = partial(wait_until, every_s=0.02)


def events(client: FlaskClient, since: int | None = None, **more: Any) -> dict[str, Any]:
    query = ({} if since is None else {"since": since}) | more
    response = client.get("/live/events", query_string=query)
    assert response.status_code == 200, response.get_data(as_text=True)
    return dict(response.get_json())


def test_a_browser_is_shown_the_page_and_others_json(client_of: ClientOf) -> None:
    client = client_of()
    assert client.get("/").get_json()["name"] == "effective-batching"
    assert client.get("/", headers={"Accept": "*/*"}).is_json
    shown = client.get("/", headers=BROWSER, follow_redirects=True)
    assert shown.request.path == "/live" and shown.mimetype == "text/html"
    assert shown.get_data(as_text=True) == page.read()
    policy = shown.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy


def test_the_files_of_the_page_are_served_and_no_others(client_of: ClientOf) -> None:
    """A browser loads them without a key, takes each for what it is, and keeps none that is old."""
    client = client_of(api_key="sesame")
    files = {file.name for file in page.HERE.iterdir() if file.suffix in (".css", ".js")}
    assert files == {*page.FILES}
    for name in page.FILES:
        given = client.get(f"/live/{name}")
        assert given.get_data(as_text=True) == page.read(name)
        assert given.mimetype == ("text/css" if name.endswith("css") else "text/javascript")
        assert given.headers["Cache-Control"] == "no-store"
        assert given.headers["X-Content-Type-Options"] == "nosniff"
    for name in ("page.html", "panel.py", "../page.py", "..%2fpage.py", "js/page.js", "x" * 999):
        response = client.get(f"/live/{name}")
        assert response.status_code == 404 and len(response.get_json()["error"]["message"]) < 400


def test_the_page_makes_no_requests_elsewhere_and_no_markup_of_data() -> None:
    files = [page.read(), *map(page.read, page.FILES)]
    elsewhere = r"(?:src|href)=(?!\"live/)|https?://|@import|innerHTML|eval\(| style=|\son\w+="
    assert not [found for text in files for found in re.findall(elsewhere, text)]


def test_live_off_leaves_nothing_of_it(client_of: ClientOf) -> None:
    client = client_of(live="off")
    assert client.get("/", headers=BROWSER).is_json
    for path in ("/live", "/live/page.js", "/live/events"):
        assert client.get(path).status_code == 404
    assert client.post("/live/load", json={"rate": 1}).status_code == 404
    assert "/live" not in client.get("/openapi.json").get_data(as_text=True)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_of_stats(name: str, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each iteration, in each mode, with padding, preempted and paused ones."""
    for module in (made_load, observer):  # on a busy machine two polls were more than 3 s apart
        monkeypatch.setattr(module, "LEASE_S", PATIENCE_S)
    mode, flags, has = CASES[name]
    client = client_of(mode=mode, loop_interval_ms=1, **flags)
    events(client)
    client.post("/stats/reset", json={})
    load = {"num_tokens": [1, 20], "prompt_tokens": [4, 64], "rate": 600, "seconds": 0.3}

    def loaded() -> Any:
        """The history after a load, once it has all kinds of rows: a slow machine sends little."""
        id_ = client.post("/live/load", json=load).get_json()["id"]
        until(lambda: events(client, load=id_)["load"] is None)
        ended = until(lambda: (e := events(client)) and len(e["ended"]) == len(e["requests"]) and e)
        return all(any(row[kind] for row in rows_of(ended)) for kind in has) and ended

    history = until(loaded)
    stats = client.get("/stats?iterations=1").get_json()
    assert_stats_say(rows_of(history), stats, has)
    for shown, counted in zip(history["iterations"], stats["iterations"]):
        assert shown[:2] == pytest.approx(counted[:2], abs=1e-5)


HOSTILE = "<script>alert(1)</script> \u202egnol " + "x" * 200


@pytest.mark.parametrize(("settings", "prompt"), [({}, None), ({"live": "prompts"}, HOSTILE[:80])])
def test_requests_are_shown_with_their_users_and_with_their_prompts_if_the_server_may(
    settings: dict[str, Any], prompt: str | None, client_of: ClientOf
) -> None:
    client = client_of(mode="static", **settings)
    events(client)
    group = {"prompt": [HOSTILE] * 3, "num_tokens": 7, "user": "ann"}
    assert client.post("/inference", json=group).status_code == 200
    shown = until(lambda: (e := events(client)) and len(e["ended"]) == 3 and e)
    assert [request[4:] for request in shown["requests"]] == [["ann", 0, prompt, ""]] * 3
    assert [(end[2], end[4]) for end in shown["ended"]] == [("finished", 7)] * 3


def test_a_load_without_lengths_fits_every_server(client_of: ClientOf) -> None:
    """Where a context was below 320 tokens, {"rate": 0} was a 400, so a page could not end its
    load; and a request beyond a user's tokens ended the load.
    """
    for most in (2, 7, 100, 319, 1024):
        client = client_of(max_model_len=most, user_tokens_per_minute=most - 1)
        id_ = client.post("/live/load", json={"rate": 500}).get_json()["id"]
        until(lambda: (s := client.get("/stats").get_json())["refused"] + s["invalid"] > 3)  # noqa: B023
        assert events(client, load=id_)["load"]["id"] == id_
        assert client.post("/live/load", json={"rate": 0}).get_json() == {"id": None}
        assert events(client)["load"] is None


@pytest.mark.parametrize(("path", "values", "message"), [
    ("/live/events?since", ["-1", "x", "", "1.5", "9" * 19], "cursor"),
    ("/stats?since", ["-1", "x", ""], "since"),
    ("/stats?iterations", ["yes", ""], "iterations"),
    ("/stats?iterations=1&since", ["-1", "x"], "since"),
    ("/live/load", [{"rate": 1001}], "rate"),
    ("/live/load", [{"rate": 1, "seconds": 61}], "seconds"),
    ("/live/load", [{"rate": 1, "num_tokens": [0, 3]}], "num_tokens"),
    ("/live/load", [{"rate": 1, "burst": True}], "burst"),
    ("/live/load", [{"rate": 1, "prompt_tokens": [1000, 1000]}], "beyond the context of 1024"),
])  # fmt: skip
def test_bounds_are_kept(path: str, values: list[Any], message: str, client_of: ClientOf) -> None:
    client = client_of()
    for value in values:
        is_load = path == "/live/load"
        response = client.post(path, json=value) if is_load else client.get(f"{path}={value}")
        assert response.status_code == 400 and message in response.get_json()["error"]["message"]


def test_a_load_lasts_as_its_page(client_of: ClientOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the page polls; the clock jumps, as a busy machine makes two polls lie far apart."""
    client = client_of(max_batch_size=2, loop_interval_ms=20)
    manager, jumps = client.application.extensions["engine"].manager, list[float]()
    monkeypatch.setattr(made_load, "LEASE_S", 20.0)
    monkeypatch.setattr(manager, "clock", lambda: time.perf_counter() + sum(jumps))
    load = {"rate": 200, "num_tokens": [50, 60], "prompt_tokens": [3, 5], "seconds": 60}
    id_ = client.post("/live/load", json=load).get_json()["id"]

    def status_after(sent: int) -> Any:
        return until(lambda: (s := events(client, load=id_)["load"])["sent"] > sent and s)

    for sent in (10, 20, 30):
        status = status_after(sent)
        jumps.append(12.0)  # two of them are longer than the lease
    assert status["id"] == id_ and 0 < status["left_s"] < 40
    assert status["sent"] >= status["in_flight"] > 10
    until(lambda: (seen := events(client, load=id_)["iterations"]) and seen[-1][2] > 10)  # a queue
    jumps.append(20.0)
    until(lambda: events(client)["load"] is None)  # no page polls with its id any more
    until(lambda: not events(client)["lines"])
    assert client.get("/stats").get_json()["cancelled"] > 10


def test_a_load_ends_by_itself_and_by_another_one(client_of: ClientOf) -> None:
    client = client_of()
    brief = {"rate": 1000, "num_tokens": [2, 3], "prompt_tokens": [1, 2], "seconds": 0.3}
    first, second = (client.post("/live/load", json=brief).get_json()["id"] for _ in range(2))
    assert events(client, load=first)["load"]["id"] == second != first
    until(lambda: events(client, load=second)["load"] is None)
    assert client.get("/stats").get_json()["completed"] > 5


def test_a_drain_does_not_wait_for_a_load() -> None:
    """Ten requests of ten seconds each are in flight, one after the other."""
    with started("--max-batch-size", "1", "--loop-interval-ms", "50") as (url, process):
        load = {"rate": 50, "num_tokens": [200, 200], "seconds": 60}
        id_ = post(f"{url}/live/load", load)["id"]
        until(lambda: get(f"{url}/live/events?load={id_}")["load"]["in_flight"] >= 10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, process.communicate()[0]
