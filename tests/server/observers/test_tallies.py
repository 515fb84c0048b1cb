"""Counts of users and priorities in /stats and /metrics add up to the totals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient

from scheduling.errors import DeadlinePassed
from scheduling.inference import Inference, State
from server.observers.server_stats import ServerStats
from server.observers.tallies import ENDINGS, MOST_NAMES, OTHERS
from tests.server.observers.test_metrics import families, metrics
from tests.server.observers.test_server_stats import finished, record
from tests.servers import ClientOf

COUNTED = ("completed", "failed", "cancelled", "expired", "refused")
# totals of /stats, and their parts of a user or a priority
TOTALS = dict(zip(COUNTED, COUNTED)) | {
    "total_input_tokens": "prompt_tokens", "total_output_tokens": "completion_tokens",
}  # fmt: skip
HI = {"prompt": "hi", "num_tokens": 3}


def assert_adds_up(stats: dict[str, Any]) -> None:
    for kind in ("users", "priorities"):
        for total, part in TOTALS.items():
            assert sum(each[part] for each in stats[kind].values()) == stats[total], (kind, part)


def scraped(client: FlaskClient, label: str) -> dict[str, dict[str, float]]:
    """Of each user or priority what /metrics tells, by its name without batching_LABEL_."""
    found: dict[str, dict[str, float]] = {}
    for family in families(client.get("/metrics").get_data(as_text=True)).values():
        for sample in family.samples:
            if sample.name.startswith(f"batching_{label}_"):
                name = sample.name.removeprefix(f"batching_{label}_")
                name = "/".join([name, *filter(None, [sample.labels.get("state")])])
                found.setdefault(sample.labels[label], {})[name] = sample.value
    return found


def stats_of(client: FlaskClient) -> dict[str, Any]:
    return dict(client.get("/stats").get_json())


def test_users_and_priorities_have_measures_of_their_own(client_of: ClientOf) -> None:
    client = client_of()
    asks: list[dict[str, Any]] = [
        {"user": "ann", "priority": 1}, {"user": "ann", "priority": 2, "num_tokens": 5},
        {"user": "bob", "priority": 2, "n": 2}, {}, {"user": ""},
    ]  # fmt: skip
    e2e: dict[str, list[float]] = {"ann": [], "bob": [], "": []}
    for ask in asks:
        told = client.post("/inference", json=HI | ask).get_json()["timings"]
        timings = told if isinstance(told, list) else [told]
        e2e[ask.get("user", "")] += [each["e2e_s"] * 1e3 for each in timings]
    stats = stats_of(client)
    users, priorities = stats["users"], stats["priorities"]
    names = ("completed", "prompt_tokens", "completion_tokens")
    counted = {name: [of[each] for each in names] for name, of in users.items()}
    assert counted == {"ann": [2, 4, 8], "bob": [2, 2, 6], "": [2, 4, 6]}, "none, or an empty one"
    assert {name: p["completed"] for name, p in priorities.items()} == {"1": 1, "2": 3, "0": 2}
    for name, latencies in e2e.items():
        found = [users[name][f"{each}_e2el_ms"] for each in ("mean", "p50", "p99")]
        expected = [sum(latencies) / 2] * 2 + [np.percentile(latencies, 99)]
        assert found == pytest.approx(expected, abs=0.002)
        assert 0 <= users[name]["mean_queue_time_ms"] <= users[name]["p99_e2el_ms"]
    assert_adds_up(stats)
    for label, kind in (("user", "users"), ("priority", "priorities")):
        for name, in_metrics in scraped(client, label).items():
            of = stats[kind][name]
            for tokens in ("prompt_tokens", "completion_tokens"):
                assert in_metrics[f"{tokens}_total"] == of[tokens]
            for measure, key in (("e2e_latency", "e2el"), ("queue_time", "queue_time")):
                n, sum_s = (in_metrics[f"{measure}_seconds_{part}"] for part in ("count", "sum"))
                assert n == of["completed"]
                assert sum_s * 1e3 == pytest.approx(of[f"mean_{key}_ms"] * n, abs=0.1)
    assert {"users", "priorities"} <= set(stats["definitions"])
    client.post("/stats/reset", json={})
    assert stats_of(client)["users"] == stats_of(client)["priorities"] == {}
    client.post("/inference", json=HI | {"user": "eve"})
    assert list(stats_of(client)["users"]) == ["eve"]
    assert scraped(client, "user").keys() == {"ann", "bob", "", "eve"}, "counters never go back"


def test_every_ending_is_its_users(client_of: ClientOf) -> None:
    client = client_of("nobatch", max_batch_size=1, max_waiting=0)
    manager = client.application.extensions["engine"].manager
    long = {"prompt": "hi", "num_tokens": 1000}
    late = client.post("/inference", json=long | {"user": "late", "timeout_s": 0.02})
    assert late.status_code == 504
    manager.enqueue(going := [Inference([0], 1000, user="gone", priority=3)])
    for stream in (False, True):
        ask = HI | {"user": "many", "priority": 2, "stream": stream}
        assert client.post("/inference", json=ask).status_code == 429
    manager.cancel(going)
    client.post("/inference", json=HI | {"user": "wrong", "num_tokens": 0})
    client.post("/inference", json=HI | {"user": "fine"})
    stats = stats_of(client)
    ended = {
        name: {ending: n for ending in TOTALS.values() if (n := user.get(ending))}
        for name, user in stats["users"].items()
    }
    fine = {"completed": 1, "prompt_tokens": 2, "completion_tokens": 3}
    own = {"late": {"expired": 1}, "gone": {"cancelled": 1}, "many": {"refused": 2}}
    assert ended == own | {"fine": fine}
    assert stats["users"]["late"]["mean_e2el_ms"] is stats["users"]["many"]["p99_e2el_ms"] is None
    assert stats["priorities"]["2"]["refused"] == 2 and stats["invalid"] == 1
    assert_adds_up(stats)
    reasons = {"stop": 0, "length": 1, "abort": 1, "timeout": 1, "error": 0}
    total = metrics(client)
    assert {reason: total[f"vllm:request_success_total/{reason}"] for reason in reasons} == reasons
    states = {"late": "expired", "gone": "cancelled", "many": "refused", "fine": "finished"}
    for name, told in scraped(client, "user").items():
        n = {ending: told[f"requests_total/{ending}"] for ending in ENDINGS}
        assert n == dict.fromkeys(ENDINGS, 0) | {states[name]: 2 if name == "many" else 1}


def test_a_late_user_is_one_of_the_others_and_requests_without_one_never_are() -> None:
    stats = ServerStats(max_batch_size=4)

    def serve(user: str | None, priority: int) -> None:
        inference = finished(0.0, 2, 1.0)
        inference.user, inference.priority = user, priority
        stats.answered(inference)

    serve(OTHERS, 0)  # a user of this name
    for i in range(MOST_NAMES + 5):
        serve(f"user {i}", i)
    serve("user 0", 0)
    serve(None, 0)
    late = Inference([0], 9, user="another", answered_at=1.0, state=State.EXPIRED)
    late.error = DeadlinePassed("late")
    stats.answered(late)
    stats.refused(Inference([0], 9, user="one more", priority=-5))
    result = stats.run().report()
    users = result["users"]
    assert users.keys() == {OTHERS, "", *(f"user {i}" for i in range(MOST_NAMES))}
    assert (users["user 0"]["completed"], users[""]["completed"]) == (2, 1)
    others = users[OTHERS]
    assert (others["completed"], others["expired"], others["refused"]) == (6, 1, 1)
    assert result["priorities"].keys() == {OTHERS, *(str(i) for i in range(MOST_NAMES))}
    assert_adds_up(result)
    stats.reset(-1.0)
    serve("one more", -5)
    assert stats.run().report()["users"].keys() == {"one more"}, "first come, in the new run"


def test_percentiles_are_of_the_latest_answers_and_means_of_all() -> None:
    stats = ServerStats(max_batch_size=4, window=100)
    for i in range(400):
        stats.answered(finished(0.0, 2, 1.0 if i < 300 else 3.0))
    user = stats.run().report()["users"][""]
    assert (user["mean_e2el_ms"], user["p50_e2el_ms"], user["p99_e2el_ms"]) == (1500, 3000, 3000)


def test_totals_go_on_while_runs_begin_anew_under_load() -> None:
    """Each request is counted once: in the run, or before it. Counters never go back."""
    stats, seen, n = ServerStats(max_batch_size=4), [0], 4000

    def serve() -> None:
        for i in range(n):
            stats.iteration(record(float(i), 2, 1))
            inference = finished(i - 3.0, 2, float(i))  # some arrived before the latest reset
            inference.user = f"user {i % 50}"
            stats.answered(inference)

    server = threading.Thread(target=serve)
    server.start()
    while server.is_alive():
        stats.reset(float(seen[-1]))
        seen.append(stats.total().counts["finished"])
        assert stats.run().counts["finished"] <= stats.total().counts["finished"]
    total = stats.total()
    assert seen == sorted(seen) and total.counts["finished"] == n
    assert (total.counts["live_rows"], total.counts["idle_rows"]) == (2 * n, n)
    assert total.seconds["busy"] == n and total.finish_reasons == {"length": n}
    users = total.tallies["users"]
    assert len(users) == MOST_NAMES + 1
    assert sum(tally.counts["finished"] for tally in users.values()) == n


def test_every_name_stays_in_the_totals_and_its_counters_never_fall() -> None:
    """After a reset, names that a run began with took the place of earlier ones among the others:
    a counter of Prometheus stopped, or fell when its name did.
    """
    stats, seen = ServerStats(max_batch_size=4), Counter[str]()

    def serve(names: Iterable[int]) -> None:
        nonlocal seen
        for i in names:
            inference = finished(0.0, 2, 1.0)
            inference.user = f"user {i}"
            stats.answered(inference)
            users = stats.total().tallies["users"].items()
            now = Counter({name: tally.counts["finished"] for name, tally in users})
            assert seen <= now and now.total() == seen.total() + 1
            seen = now

    serve(range(20))
    stats.reset(-1.0)
    serve(range(39, -1, -1))  # the new run has other names first
    first = [f"user {i}" for i in (*range(20), *range(28, 40))]
    assert seen == dict.fromkeys(first, 1) | {f"user {i}": 2 for i in range(20)} | {OTHERS: 8}
    assert stats.run().tallies["users"].keys() == {f"user {i}" for i in range(8, 40)} | {OTHERS}
