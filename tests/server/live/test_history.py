"""Histories: every row of every iteration, for pages that poll when they like."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
import re
from typing import Any

import pytest

from scheduling.errors import Cancelled
from scheduling.inference import CachedPrefix, Inference, Iteration, Row
from scheduling.policies import ORDERS, Dynamic, MultiBin, Srpt, Static
from scheduling.prefix_cache import block_keys
from scheduling.records import IterationRecord
from server.live import page
from server.live.history import KEPT, Cell, History, QueueSnapshot
from server.live.observer import BACKLOG, LEASE_S, Live, RunObserver, snapshot_of
from simulate import PS, Loop, SimulatedReplica, seconds
from simulate.costs import Costs
from simulate.replica import Stretch
from tests.server.live.shown import iterations
from tests.virtual import make_scheduler

ABOUT = {"name": "dynamic"}
Trace = list[tuple[float, list[Inference]]]


def served(policy: Any, trace: Trace, **limits: Any) -> tuple[RunObserver, list[Iteration]]:
    """Serve a trace, in which each iteration takes 10 ms; return its history and iterations."""
    scheduler = make_scheduler(policy, **limits)
    kept, seen = RunObserver(scheduler, ABOUT, zero=0.0), list[Iteration]()

    def computed(stretch: Stretch) -> None:
        seen.append(stretch.iteration)
        begun, took = seconds(stretch.begun), seconds(stretch.first)
        kept.iteration(IterationRecord(begun, took, stretch.iteration))

    def ended(now: float, inference: Inference) -> tuple[()]:
        kept.answered(inference)
        return ()

    loop, costs = Loop(), Costs.straight("given", PS // 100)
    loop.serve(trace, SimulatedReplica(loop, scheduler, costs, computed=computed, ended=ended))
    return kept, seen


def some_trace(seed: int, n: int = 60) -> Trace:
    rng = random.Random(seed)
    at, trace = 0.0, []
    for _ in range(n):
        at += rng.expovariate(20.0)
        trace.append((at, [Inference([0] * rng.randint(1, 40), rng.randint(1, 30))]))
    return trace


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "static": (Static(), {}), "static, compacted": (Static(compact_batches=True), {}),
    "dynamic": (Dynamic(), {"token_budget": 16}),
    "demand, few blocks": (Dynamic(kv_reservation="demand"), {"n_blocks": 20, "token_budget": 16}),
    "srpt, which pauses": (Dynamic(), {"order": Srpt(), "max_batch_size": 3}),
    "prompts first, which pauses": (Dynamic(prefill="first"), {}),
    "padding": (Dynamic(), {"decoder_batch_sizes": [4, 8]}), "bins": (MultiBin(), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_history_has_every_row_of_every_iteration(case: str) -> None:
    policy, limits = CASES[case]
    limits = {"max_batch_size": 8, "n_blocks": 200} | limits
    kept, served_iterations = served(policy, some_trace(1), **limits)
    history = json.loads(kept.json("x"))
    lines: dict[int, int] = {}
    for read, iteration in zip(iterations(history), served_iterations, strict=True):
        computed = {cell.id: cell for cell in read.cells.values() if cell.kind not in "sw"}
        assert len(read.cells) == len({cell.id for cell in read.cells.values()}), "a line each"
        assert computed.keys() == {row.inference.id for row in iteration.rows}
        for row in iteration.rows:
            cell = computed[row.inference.id]
            tokens = 1 if row.idle else row.n_tokens
            kind = "i" if row.idle else "r" if row.recomputed else "d" if row.decodes else "p"
            assert (cell.kind, cell.n, cell.start) == (kind, tokens, row.start)
        assert (read.waiting, read.running) == (iteration.waiting, iteration.running)
        assert (read.blocks_used, read.padding) == (iteration.blocks_used, iteration.padding)
        for line, cell in read.cells.items():
            assert lines.setdefault(cell.id, line) == line or case.startswith("demand")
            lines[cell.id] = line
    assert len(served_iterations) == history["next"] > 50
    assert len(history["ended"]) == len(history["requests"]) == 60
    kinds = {cell.kind for read in iterations(history) for cell in read.cells.values()}
    expected = {"static": "i", "demand, few blocks": "r", "srpt, which pauses": "s"}
    expected |= {"prompts first, which pauses": "s"}
    assert {"d", "p", *expected.get(case, "")} <= kinds
    assert not case.endswith("compacted") or "w" not in kinds, "a finished request needs no budget"


def test_a_worked_example() -> None:
    """Two rows; A has two tokens and B three, C comes when A leaves and takes its line.

    iteration   0    1    2    3
    line 0      A p  A d  C p
    line 1      B p  B d  B d
    """
    a, b, c = Inference([0] * 3, 2, user="ann"), Inference([0], 3), Inference([0] * 4, 1)
    a.adapter = "sql"
    kept, _ = served(Dynamic(), [(0.0, [a]), (0.0, [b]), (0.001, [c])], max_batch_size=2)
    history = json.loads(kept.json("dynamic"))
    assert [iteration[-1] for iteration in history["iterations"]] == [
        [0, 0, "p", 3, 0, 0, 1, 1, "p", 1, 0, 0],
        [0, 0, "d", 1, 3, 0, 1, 1, "d", 1, 1, 0],
        [0, 2, "p", 4, 0, 0],
    ]
    assert [iteration[:5] for iteration in history["iterations"]] == [
        [0.0, 0.01, 0, 2, 3], [0.01, 0.01, 1, 2, 3], [0.02, 0.01, 0, 2, 3],
    ]  # fmt: skip
    assert history["requests"][0] == [0, 0.0, 3, 2, "ann", 0, None, "sql"]
    assert history["ended"] == [
        [0, 0.02, "finished", 0.01, 2], [1, 0.03, "finished", 0.01, 3],
        [2, 0.03, "finished", 0.029, 1],
    ]  # fmt: skip
    assert (history["first"], history["next"], history["restart"]) == (0, 3, True)


class ByHand:
    """A manager whose clock is moved by hand, its observer, and its requests."""

    def __init__(self) -> None:
        self.now = 0.0
        manager: Any = self
        self.live = Live(manager, ABOUT)

    def clock(self) -> float:
        return self.now

    def inspect(self, look: Any) -> QueueSnapshot:
        return QueueSnapshot(100, 0, 0, [], 100)

    def computes(self, *rows: tuple[Inference, int]) -> None:
        """An iteration of rows that compute a token each."""
        self.live.iteration(IterationRecord(self.now, 0.001, iteration_of(*rows)))


def iteration_of(*rows: tuple[Inference, int]) -> Iteration:
    made = [Row(i, start, 1, [], True, False) for i, start in rows]
    return Iteration(made, len(made), 0, 7)


def request(id_: int = 0, user: str | None = None) -> Inference:
    made = Inference([0] * 5, 10_000, user=user)
    made.id = id_
    return made


class Reader:
    """A page: it polls when it likes, and keeps the events."""

    def __init__(self, server: ByHand):
        self.live = server.live
        self.cursor: int | None = None
        self.cells: dict[int, dict[int, Cell]] = {}  # by iteration
        self.restarts = self.ended = 0
        self.known: dict[int, Any] = {}
        self.ask()

    def ask(self) -> dict[str, Any]:
        events: dict[str, Any] = json.loads(self.live.events(self.cursor, load=None))
        if events["restart"]:
            self.restarts += 1
            self.cells.clear()
            self.known.clear()
        else:  # as after the last one that it knows
            before = self.cells.get(events["first"] - 1, {})
            cells = sorted(before.items())
            events["lines"] = [[line, *cell.at(events["first"])[:5]] for line, cell in cells]
        self.known |= {request[0]: request for request in events["requests"]}
        for seen in iterations(events):
            self.cells[seen.number] = dict(seen.cells)
            assert {cell.id for cell in seen.cells.values()} <= self.known.keys()
        self.cursor = events["cursor"]
        self.ended += len(events["ended"])
        self.last = events
        return events


def test_readers_who_ask_at_different_times_see_the_same() -> None:
    server = ByHand()
    often, seldom = Reader(server), Reader(server)
    rng = random.Random(0)
    running: dict[int, tuple[Inference, int]] = {}
    for k in range(1500):
        if len(running) < 4 and rng.random() < 0.2:
            running[k] = request(k), 5
        server.computes(*running.values())
        for id_, (inference, start) in list(running.items()):
            running[id_] = inference, start + 1
            if rng.random() < 0.05:
                inference.answered_at = server.now
                server.live.answered(inference)
                del running[id_]
        server.now += 0.002
        if rng.random() < 0.2:
            often.ask()
        if rng.random() < 0.01:
            seldom.ask()
    often.ask(), seldom.ask()
    late = Reader(server)
    assert often.restarts == seldom.restarts == late.restarts == 1
    assert len(often.cells) == 1500 and often.cells == seldom.cells == late.cells
    assert often.ended == seldom.ended == late.ended > 50
    late.live = Reader(ByHand()).live  # where this server was: no cursor is one of its own
    assert late.ask()["restart"]


def test_a_page_that_comes_late_gets_the_last_iterations_whole() -> None:
    """A request that came before those is whole, too; its beginning is forgotten."""
    server, old, n = ByHand(), request(user="old"), KEPT + 500
    first = Reader(server)
    for k in range(n):
        server.computes((old, 5 + k))
        if k % 100 == 0:
            first.ask()
    new = Reader(server)
    assert (new.last["first"], new.last["next"], len(new.last["iterations"])) == (500, n, KEPT)
    assert new.last["lines"] == [[0, 0, "d", 1, 505, 0]] and new.known[0][4] == "old"
    first.ask()
    assert all(first.cells[k] == new.cells[k] for k in range(500, n))


def test_a_page_begins_anew_where_something_was_not_noted() -> None:
    """While no page asks nothing is noted; and a page that falls too far behind skips to now."""
    server, row = ByHand(), request()
    server.computes((row, 1))
    reader = Reader(server)
    assert reader.last["iterations"] == [], "while no page asks nothing is noted"
    server.computes((row, 1))
    assert len(reader.ask()["iterations"]) == 1
    server.now += 2 * LEASE_S  # the page is closed
    assert not reader.ask()["restart"], "nothing happened meanwhile"
    server.now += 2 * LEASE_S
    server.computes((row, 2))
    events = reader.ask()
    assert events["restart"] and events["iterations"] == [] and events["first"] == 1
    for k in range(BACKLOG + 1):
        server.computes((row, k))
    events = reader.ask()
    assert events["restart"] and events["iterations"] == []
    server.computes((row, 5))
    assert len(reader.ask()["iterations"]) == 1


def test_iterations_do_not_overlap_by_rounding() -> None:
    history, took = History(ABOUT), 0.6e-6
    for k in range(50):
        history.iteration(k * took, took, iteration_of((request(), 1 + k)))
    noted = json.loads(history.since(None, 1.0))["iterations"]
    for (at, lasted, *_), (following, *_) in itertools.pairwise(noted):
        assert at + lasted <= following + 1e-9


@pytest.mark.parametrize("ends_after", [0, 1, 3])
def test_a_request_that_ends_while_its_row_goes_on_is_noted_once(ends_after: int) -> None:
    """The client left while an iteration ran, or the stream ended and its batch goes on."""
    server, one, other = ByHand(), request(0), request(1)
    reader, noted = Reader(server), 0
    for k in range(5):
        if k == ends_after:
            one.answered_at = server.now
            server.live.answered(one)
        rows = ((one, 3 + k), (other, 3 + k)) if k <= 3 else ((other, 3 + k),)
        server.computes(*rows)
        noted += len(reader.ask()["requests"])
    assert noted == 2 and reader.ended == 1
    late = Reader(server).last
    assert [request[0] for request in late["requests"]] == [0, 1] and len(late["ended"]) == 1


@pytest.mark.parametrize("name", list(ORDERS))
def test_the_first_request_of_a_queue_s_snapshot_is_admitted_next(name: str) -> None:
    order = ORDERS[name]()
    scheduler = make_scheduler(Dynamic(), order=order, max_batch_size=1)
    rng = random.Random(5)
    for k in range(12):
        user, tokens = rng.choice("abc"), rng.randint(1, 30)
        ids = [rng.randrange(2)] * rng.randint(4, 20)
        keys = block_keys(ids, scheduler.limits.block_size)
        scheduler.enqueue([Inference(ids, tokens, user=user, prefix=CachedPrefix(keys))], 0.1 * k)
    for step in range(4):
        now = 2.0 + step
        first = snapshot_of(scheduler, 64, now).queue[0]
        iteration, _ = scheduler.schedule(now)
        assert [row.inference for row in iteration.rows] == [first]
        assert len(snapshot_of(scheduler, 64, now).queue) <= 11
        scheduler.fail([first], Cancelled("next"), now)


def test_no_name_can_end_the_script_of_a_saved_page_and_its_own_script_alone_runs() -> None:
    name = "</script><script>alert(1)</script>"
    html = page.saved([json.dumps({"about": {"name": name}})])
    assert html.count("</script>") == page.read().count("</script>")
    [data] = [part.split("</script>")[0] for part in html.split('id="runs">')[1:]]
    assert json.loads(data)[0]["about"]["name"] == name
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="(.+)">', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "self" not in policy
    for tag in ("style", 'script type="module"'):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag.split()[0]}-src 'sha256-{digest}'" in policy
    assert not re.findall("^(?:import|export) |(?:src|href)=", html, re.MULTILINE)
