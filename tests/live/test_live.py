"""GET /live: the page, what it is told, and the load that it asks for."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from client.calls import ServerError, get, post
from live import made_load, page
from tests.servers import PATIENCE_S, free_port, launched, wait_until
from tests.shown import (
    CASES,
    LOAD,
    assert_pauses_lasted,
    assert_stats_say,
    assert_timeline_says,
    rows_of,
)

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def events(client: FlaskClient, since: int | None = None, **more: Any) -> dict[str, Any]:
    query = ({} if since is None else {"since": since}) | more
    response = client.get("/live/events", query_string=query)
    assert response.status_code == 200, response.get_data(as_text=True)
    return dict(response.get_json())


def is_ready(url: str) -> bool:
    try:
        return bool(get(f"{url}/ready"))
    except ServerError:
        return False


def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


def test_a_browser_is_shown_the_page_and_others_json(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of()
    assert client.get("/").get_json()["name"] == "effective-batching"
    assert client.get("/", headers={"Accept": "*/*"}).is_json
    shown = client.get("/", headers=BROWSER, follow_redirects=True)
    assert shown.request.path == "/live" and shown.mimetype == "text/html"
    assert shown.get_data(as_text=True) == page.empty()
    policy = shown.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page.empty(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_page_makes_no_requests_elsewhere_and_no_markup_of_data() -> None:
    assert not re.findall(
        r"(?:src|href)=|https?://(?!www\.w3\.org)|@import|innerHTML|eval\(| style=|\son\w+=",
        page.empty(),
    )


def test_live_off_leaves_nothing_of_it(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(live="off")
    assert client.get("/", headers=BROWSER).is_json
    for path in ("/live", "/live/events", "/timeline"):
        assert client.get(path).status_code == 404
    assert client.post("/live/load", json={"rate": 1}).status_code == 404
    assert "/live" not in client.get("/openapi.json").get_data(as_text=True)


def test_under_a_key_the_page_is_open_and_what_it_asks_is_not(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of(api_key="sesame")
    assert client.get("/live").status_code == 200
    assert client.get("/", headers=BROWSER, follow_redirects=True).status_code == 200
    assert client.get("/").status_code == 401
    for path in ("/live/events", "/timeline"):
        assert client.get(path).status_code == 401
    assert client.post("/live/load", json={"rate": 1}).status_code == 401
    with_key = {"Authorization": "Bearer sesame"}
    assert client.get("/live/events", headers=with_key).status_code == 200


@pytest.mark.parametrize("name", CASES)
def test_what_a_page_and_a_timeline_are_told_is_what_stats_count(
    name: str, client_of: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each iteration, in each mode, with padding, preempted and paused rows."""
    mode, flags, has = CASES[name]
    client = client_of(mode=mode, loop_interval_ms=1, **flags)
    scheduler = client.application.extensions["server"].scheduler
    schedule, planned = scheduler.schedule, []

    def noted(now: float) -> Any:
        iteration, wake_at = schedule(now)
        planned.extend([now] if iteration.rows else [])
        return iteration, wake_at

    monkeypatch.setattr(scheduler, "schedule", noted)
    events(client)
    client.post("/stats/reset", json={})
    assert not planned
    load = LOAD | {"rate": 600, "seconds": 0.3}  # so that rows pause on a busy machine
    id_ = client.post("/live/load", json=load).get_json()["id"]
    until(lambda: events(client, load=id_)["load"] is None)
    history = until(lambda: (e := events(client)) and len(e["ended"]) == len(e["requests"]) and e)
    stats = client.get("/stats?iterations=1").get_json()
    assert_stats_say(rows_of(history), stats, has)
    assert_pauses_lasted(rows_of(history), stats, planned)
    for mine, theirs in zip(history["iterations"], stats["iterations"]):
        assert mine[:2] == pytest.approx(theirs[:2], abs=1e-5)
    assert_timeline_says(client.get("/timeline?last=2000").get_json()["traceEvents"], stats)


def test_what_is_told_of_requests(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(mode="static")
    events(client)
    group = {"prompt": ["one", "two and more", "three"], "num_tokens": 7, "user": "ann"}
    assert client.post("/inference", json=group).status_code == 200
    assert client.post("/inference", json={"prompt": "four", "num_tokens": 3}).status_code == 200
    told = until(lambda: (e := events(client)) and len(e["ended"]) == 4 and e)
    assert sorted(told["requests"])[0][4:] == ["ann", 0, None]
    assert [end[2:] for end in told["ended"]] == [
        ["finished", pytest.approx(end[3]), 7 if k < 3 else 3]
        for k, end in enumerate(told["ended"])
    ]


def test_prompts_are_shown_if_the_server_says_so(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of(live_prompts=True)
    cursor = events(client)["cursor"]
    hostile = "<script>alert(1)</script> \u202egnol " + "x" * 200
    client.post("/inference", json={"prompt": hostile, "num_tokens": 2})
    told = until(lambda: (e := events(client, cursor)) and e["ended"] and e)
    [request] = told["requests"]
    assert request[-1] == hostile[:80]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"rate": 1001}, "rate"),
        ({"rate": -1}, "rate"),
        ({"rate": "10"}, "rate"),
        ({"rate": 1, "seconds": 61}, "seconds"),
        ({"rate": 1, "num_tokens": [0, 3]}, "num_tokens"),
        ({"rate": 1, "burst": True}, "burst"),
        ({"rate": 1, "num_tokens": [1, 2**20]}, "beyond the context of 1024"),
        ({"rate": 1, "prompt_tokens": [1000, 1000]}, "beyond the context of 1024"),
        ({}, "rate"),
    ],
)
def test_a_load_that_cannot_be_is_refused(
    body: Any, said: str, client_of: Callable[..., FlaskClient]
) -> None:
    response = client_of().post("/live/load", json=body)
    assert response.status_code == 400 and said in response.get_json()["error"]["message"]


@pytest.mark.parametrize("since", ["-1", "x", "", "1.5", "9" * 19])
def test_a_cursor_that_is_none_is_refused(
    since: str, client_of: Callable[..., FlaskClient]
) -> None:
    response = client_of().get("/live/events", query_string={"since": since})
    assert response.status_code == 400 and "cursor" in response.get_json()["error"]["message"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Who does not ask for 0.4 s is gone."""
    monkeypatch.setattr(made_load, "LEASE_S", 0.4)
    yield


@pytest.mark.usefixtures("impatient")
def test_a_load_goes_on_while_its_page_asks_and_ends_with_it(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of(max_batch_size=2, loop_interval_ms=20)
    load = {"rate": 200, "num_tokens": [50, 60], "prompt_tokens": [3, 5], "seconds": 30}
    id_ = client.post("/live/load", json=load).get_json()["id"]
    begun = time.monotonic()
    while time.monotonic() < begun + 1.0:  # twice the lease
        told = events(client, load=id_)["load"]
        time.sleep(0.05)
    assert told["id"] == id_ and 25 < told["left_s"] < 29.5 and told["in_flight"] > 10
    assert told["sent"] == pytest.approx(200, rel=0.5)
    waiting = events(client)["iterations"][-1][2]
    assert waiting > 10, "a queue grew"
    # nobody asks for it: the page is gone
    until(lambda: events(client)["load"] is None, 5.0)
    told = until(lambda: (e := events(client)) and not e["lines"] and e)
    assert client.get("/stats").get_json()["cancelled"] > 10


@pytest.mark.usefixtures("impatient")
def test_a_load_ends_by_itself_by_a_rate_of_0_and_by_another_one(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of()
    brief = {"rate": 100, "num_tokens": [2, 3], "prompt_tokens": [1, 2], "seconds": 0.3}
    id_ = client.post("/live/load", json=brief).get_json()["id"]
    until(lambda: events(client, load=id_)["load"] is None)
    stats = client.get("/stats").get_json()
    assert stats["completed"] > 5 and stats["cancelled"] == 0
    first = client.post("/live/load", json=brief | {"seconds": 20}).get_json()["id"]
    second = client.post("/live/load", json=brief | {"seconds": 20}).get_json()["id"]
    assert events(client, load=first)["load"]["id"] == second != first
    assert client.post("/live/load", json={"rate": 0}).get_json() == {"id": None}
    assert events(client)["load"] is None


def test_a_drain_does_not_wait_for_a_load() -> None:
    port = free_port()
    command = (sys.executable, "launch.py", "dynamic", "--model", "fake", "--port", str(port),
               "--max-batch-size", "1", "--loop-interval-ms", "50")  # fmt: skip
    with launched(*command) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url))
        load = {"rate": 50, "num_tokens": [200, 200], "seconds": 60}
        id_ = post(f"{url}/live/load", load)["id"]
        wait_until(lambda: get(f"{url}/live/events?load={id_}")["load"]["in_flight"] > 5)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, process.communicate()[0]
        assert time.monotonic() < begun + 10, "ten requests of ten seconds each were in flight"


def test_a_timeline_of_a_running_server(client_of: Callable[..., FlaskClient]) -> None:
    client = client_of()
    assert not [e for e in client.get("/timeline").get_json()["traceEvents"] if e["ph"] == "X"]
    client.post("/inference", json={"prompt": "hi", "num_tokens": 8})
    told = client.get("/timeline?last=5").get_json()["traceEvents"]
    assert [e["name"] for e in told if e["ph"] == "X"] == ["0 decode"] * 5
    for bad in ("0", "x", "-3"):
        response = client.get(f"/timeline?last={bad}")
        said = response.get_json()["error"]["message"]
        assert response.status_code == 400 and "from 1 on" in said
