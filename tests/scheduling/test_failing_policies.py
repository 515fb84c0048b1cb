"""A policy or an order that fails is an engine that fails: every request gets a sentence, and after
three failures in a row the server ends; one that hangs ends it.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching import FAILURES, BatchingManager
from client.calls import ServerError, post
from config.config import BOOT_ERROR
from generate.auto import build
from generate.fake import FakeGenerator
from scheduling import user_policies
from scheduling.errors import EngineFailed, GenerationFailed, ServingError
from scheduling.inference import Inference, State, TokenEvent
from scheduling.planning import rows_to_draft
from scheduling.policies import (
    MODES,
    Dynamic,
    Fcfs,
    Mlfq,
    NoBatching,
    Order,
    Plan,
    Policy,
    Static,
    View,
)
from scheduling.records import IterationRecord
from scheduling.user_policies import LONGEST_S
from server import engine
from server.asynchronous import AsynchronousManager
from server.observers.recording import line_of, record
from simulate import drive, loop
from simulate.replay import replay
from tests.counts import examples
from tests.servers import PATIENCE_S, Spelling, started
from tests.virtual import Ask, make_scheduler, run

# bodies of `plan` that fail, and a part of the sentence that their requests get
PLANS = {
    "Raises": (
        "return 1 / 0 if view.processed > 4 else super().plan(view)",
        r"Raises failed: ZeroDivisionError: division by zero \(faults.py, line 9\)",
    ),
    "NoPlan": (
        "return super().plan(view) if view.processed < 4 else None",
        "NoPlan failed: TypeError: plan returned None; it returns a Plan",
    ),
    "Impossible": (
        "p = super().plan(view); return p if view.processed < 4 else Plan([], p.admit, p.run * 2)",
        "Impossible failed: ValueError: .* no inference has two rows",
    ),
    "RunsInferences": (
        "return Plan(run=[*view.waiting])",
        r"TypeError: Plan.run is a list of pairs, as \[\(inference, tokens to compute\)\]",
    ),
    "RunsHalves": (
        "return Plan(run=[(inference, 0.5) for inference in view.waiting])",
        r"TypeError: Plan.run is a list of pairs, .* and not \[\(Inference",
    ),
    "AdmitsInferences": (
        "return Plan(admit=[*view.waiting])",
        r"Plan.admit is a list of pairs, as \[\(inference, tokens to reserve\)\]",
    ),
    "PreemptsPairs": (
        "return Plan(preempt=[(inference, 1) for inference in view.waiting])",
        "TypeError: Plan.preempt is a list of inferences",
    ),
    "PreemptsForEver": (
        "return Plan(preempt=itertools.repeat(next(view.waiting)))",
        "TypeError: Plan.preempt is a list of inferences, and not repeat",
    ),
    "Leaves": ("sys.exit(0)", r"Leaves failed: SystemExit: 0 \(faults.py, line \d+\)"),
    "Closes": ("raise GeneratorExit", r"Closes failed: GeneratorExit \(faults.py, line"),
    "Interrupts": ("raise KeyboardInterrupt", r"Interrupts failed: KeyboardInterrupt \(faults.py"),
    "Mutters": (
        "raise Mute",
        r"Mutters failed: Mute: its text is not shown, for its __str__ raises SystemExit \(faults",
    ),
    "WakesNever": (
        "return Plan(wake_at=math.nan)",
        "ValueError: Plan.wake_at is a time in seconds or None, and not nan",
    ),
    "Nothing": ("return Plan()", "2 requests wait and 0 run, and the plan computes none of them"),
    "WakesAtOnce": (
        "return Plan(wake_at=view.now)",
        "2 requests wait and 0 run, and the plan computes none of them",
    ),
    "Alternates": (
        "return Plan([*view.running], [] if view.running else [(i, 1) for i in view.waiting])",
        "[12] requests wait and [01] run, and the plan computes none of them",
    ),
}
KEYS = {  # and of `key`
    "NoKey": (
        "return inference.prompt_ids[9]",
        r"NoKey failed: IndexError: list index out of range \(faults.py, line \d+\)",
    ),
    "NanKey": (
        "return (1, math.nan)",
        "NanKey failed: ValueError: the key of a request is .*nan.*; NaN has no place",
    ),
    "LeavingKey": ("sys.exit(0)", r"LeavingKey failed: SystemExit: 0 \(faults.py, line \d+\)"),
    "ListKey": ("return [1]", "ListKey failed: TypeError: unhashable type: 'list'"),
}
FAULTS = """
import itertools, math, sys
from scheduling.policies.base import Plan
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.orders import Order

"""
for name, (body, _) in PLANS.items():
    FAULTS += f"class {name}(Dynamic):\n    def plan(self, view):\n        {body}\n\n"
for name, (body, _) in KEYS.items():
    FAULTS += f"class {name}(Order):\n    def key(self, inference):\n        {body}\n\n"


FAULTS += "class Mute(Exception):\n    def __str__(self):\n        sys.exit(0)\n"


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Any]:
    """Return what makes a policy, or an order, of FAULTS by its name, as the server does."""
    path = tmp_path / "faults.py"
    path.write_text(FAULTS)
    known = set(user_policies.SOURCES)

    def make(name: str) -> tuple[Policy, Order]:
        modes: dict[str, Any] = {}
        orders: dict[str, Any] = {}
        user_policies.load([f"{path}:{name}"], {}, modes, orders)
        for kind in modes.values():
            return kind(), Fcfs()
        return Dynamic(), next(iter(orders.values()))()

    yield make
    for kind in user_policies.SOURCES.keys() - known:
        del user_policies.SOURCES[kind]


def asked(manager: BatchingManager, n: int = 1) -> list[ServingError | None]:
    """Queue requests together; return how each ended."""
    group = [Inference([i] * 6, 4) for i in range(n)]
    try:
        manager.enqueue(group)
    except ServingError as error:
        return [error] * n
    for inference in group:
        assert inference.done.wait(PATIENCE_S), "nobody answered"
    return [inference.error for inference in group]


@pytest.mark.parametrize("name", PLANS | KEYS)
@pytest.mark.parametrize("kind", [BatchingManager, AsynchronousManager])
def test_its_requests_get_the_sentence_and_after_three_failures_the_server_ends(
    kind: type[BatchingManager], name: str, users: Any
) -> None:
    """The server went on with `dynamic` before, and one that planned nothing waited for ever."""
    (_, sentence), (policy, order) = (PLANS | KEYS)[name], users(name)
    manager = kind(make_scheduler(policy, order=order), FakeGenerator)
    ended = threading.Event()
    manager.on_failure(lambda error: ended.set())
    for error in [error for _ in range(FAILURES) for error in asked(manager, 2)]:
        assert isinstance(error, GenerationFailed)
        assert re.search(f"Generation failed: .*{sentence}", str(error))
    asked(manager)  # an iteration that was computed meanwhile may have succeeded once
    assert ended.wait(PATIENCE_S)
    with pytest.raises(EngineFailed, match=f"This server is broken and ends .*{sentence}"):
        manager.enqueue([Inference([3], 2)])
    assert name in (manager.not_ready_because() or "")
    pool = manager._scheduler.pool
    assert pool.free_blocks == pool.n_blocks and not manager._scheduler.in_flight()
    manager.close()


def test_requests_that_no_order_can_place_are_counted_and_end_an_engine_that_computes(
    users: Any,
) -> None:
    """One iteration ahead, the end was forgotten when the iteration before succeeded."""
    policy, order = users("NoKey")
    gate, states, ended = Spelling([1], gated=True), list[State](), threading.Event()
    manager = AsynchronousManager(make_scheduler(policy, order=order), lambda: gate)
    manager.on_failure(lambda error: ended.set())

    class Notes:
        def iteration(self, record: IterationRecord) -> None: ...

        def answered(self, inference: Inference) -> None:
            states.append(inference.state)

    manager.observe(Notes())
    manager.enqueue([runs := Inference([0] * 10, 9)])
    assert gate.started.acquire(timeout=PATIENCE_S)
    for _ in range(FAILURES):
        assert isinstance(asked(manager)[0], GenerationFailed)
    assert states == FAILURES * [State.FAILED]
    gate.go.release(9)
    assert ended.wait(PATIENCE_S) and runs.done.is_set()
    assert "NoKey failed: IndexError" in (manager.not_ready_because() or "")
    manager.close()


@pytest.mark.parametrize("name", ["Nothing", "WakesAtOnce", "Alternates"])
def test_virtual_time_finds_the_same(name: str, users: Any) -> None:
    with pytest.raises(RuntimeError, match="the plan computes none of them and has no wake_at"):
        run(users(name)[0], [Ask(0.0), Ask(9.0)])


class Patient(Dynamic):
    """Plans every minute, and lets requests join once the oldest has waited for an hour."""

    def plan(self, view: View) -> Plan:
        waited = [view.now - each.arrived_at for each in view.waiting]
        if view.running or max(waited, default=0.0) >= 3600:
            return super().plan(view)
        return Plan(wake_at=view.now + 60)


class Later(Dynamic):
    def plan(self, view: View) -> Plan:
        return Plan(wake_at=view.now + 1)


def test_virtual_time_ends_where_every_plan_only_names_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only Ctrl-C ended it. A policy that is patient, or that waits for a request which is still to
    come, goes on.
    """
    monkeypatch.setattr(loop, "MOST_PLANS", 100)
    few = [[Inference([1], 3)] for _ in range(3)]
    drive(make_scheduler(Patient()), zip([0.0, 4000.0, 50_000.0], few), lambda _: 1.0)
    assert [each.admitted_at for [each] in few] == [3600.0, 7600.0, 53_600.0]
    made = make_scheduler(Later())
    with pytest.raises(RuntimeError, match="100 plans in a row computed nothing, and no request"):
        drive(made, [(0.0, [Inference([1], 3)]), (250.0, [last := Inference([1], 3)])], lambda _: 1)
    assert last.arrived_at == 250.0, "which is waited for, with more plans than that"


def test_one_that_leaves_proposes_no_drafts(users: Any) -> None:
    scheduler = make_scheduler(users("Leaves")[0])
    scheduler.enqueue([Inference([1], 3)], 0.0)
    assert rows_to_draft(scheduler, 1.0) == []


def test_a_recording_of_one_that_leaves_has_its_error_and_is_replayed(
    users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was missing, and the replay ended with exit code 0."""
    monkeypatch.setitem(MODES, "leaves", type(users("Leaves")[0]))
    written: list[dict[str, Any]] = []
    scheduler = record(build("dynamic", {"model": "fake"}, {}), written.append)
    scheduler.policy = MODES["leaves"]()
    scheduler.enqueue([Inference([1], 3)], 0.0)
    with pytest.raises(SystemExit):
        scheduler.schedule(1.0)
    assert written[-1]["error"] == "SystemExit"
    written[0]["settings"]["mode"] = "leaves"
    assert replay(map(line_of, written)).first_difference is None


# methods of policies and orders that a user's may have, as each is called
CALLS = ["plan", "check", "arrive", "key", "rank", "computed", "promote", "ordered", "is_overdue"]


@st.composite
def failing(draw: st.DrawFn) -> tuple[Policy, Order, Counter[str]]:
    """Draw a policy and an order of which some calls raise, by their number, and count them."""
    calls: Counter[str] = Counter()
    error = draw(st.sampled_from([LookupError, SystemExit]))  # the latter ends a thread in silence
    faults = draw(st.sets(st.tuples(st.sampled_from(CALLS), st.integers(1, 30)), min_size=1))
    policy = draw(st.sampled_from([Dynamic(), Dynamic("demand", watermark=0.0), Static(),
                                   NoBatching()]))  # fmt: skip
    preemptive = isinstance(policy, Dynamic) and draw(st.booleans())
    order: Order = Mlfq(0.001, 2) if preemptive else Fcfs()

    def may_fail(kind: type[Any]) -> type[Any]:
        methods = {}
        for name in CALLS:
            if hasattr(kind, name):

                def method(self: Any, *args: Any, name: str = name, **more: Any) -> Any:
                    calls[name] += 1
                    if (name, calls[name]) in faults:
                        raise error(f"call {calls[name]} of {name}")
                    return getattr(kind, name)(self, *args, **more)

                methods[name] = method
        return type(kind.__name__, (kind,), methods)

    made = may_fail(type(policy))(**vars(policy)), may_fail(type(order))(**vars(order))
    return *made, calls


GROUPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=12)
KINDS = st.sampled_from([BatchingManager, AsynchronousManager])


@examples(600)
@given(kind=KINDS, parts=failing(), groups=GROUPS)
def test_whatever_fails_no_request_is_lost(
    kind: type[BatchingManager],
    parts: tuple[Policy, Order, Counter[str]],
    groups: list[tuple[int, int]],
) -> None:
    """A key that could not be made, after a preemption, left a request that nobody answered."""
    policy, order, _ = parts
    scheduler = make_scheduler(policy, order=order, max_batch_size=3, n_blocks=9, token_budget=5)
    manager = kind(scheduler, lambda: FakeGenerator(lambda seconds: None))
    queued: list[Inference] = []
    lowest = [0]

    def listen(event: TokenEvent) -> None:
        lowest.append(min(event.inference.tokens[: event.n_tokens], default=0))

    for n, tokens in groups:
        group = [Inference([tokens] * (1 + 2 * tokens), tokens) for _ in range(n)]
        for each in group:
            each.leader, each.listener = None if each is group[0] else group[0], listen
        try:
            manager.enqueue(group)
        except ServingError:
            continue
        queued += group
    for inference in queued:
        assert inference.done.wait(PATIENCE_S), "nobody answered"
        assert inference.error or len(inference.tokens) == inference.num_tokens
    assert not min(lowest), "a pending token was shown"
    if manager.not_ready_because() is None:
        assert not scheduler.has_work and not scheduler.in_flight()
        assert scheduler.pool.free_blocks == scheduler.pool.n_blocks
    manager.close()


def test_a_plan_that_hangs_is_named_without_the_lock_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, goes_on, now = threading.Event(), threading.Event(), [0.0]

    class Hangs(Dynamic):
        def plan(self, view: View) -> Plan:
            hangs.set()
            goes_on.wait(PATIENCE_S)
            return super().plan(view)

    manager = BatchingManager(make_scheduler(Hangs()), FakeGenerator, clock=lambda: now[0])
    manager.enqueue([Inference([0], 1)])
    assert hangs.wait(PATIENCE_S)
    assert manager.deciding.hangs_because() is None and manager.not_ready_because() is None
    now[0] = LONGEST_S + 1
    why = "a plan of Hangs has been running for more than 60 s"
    assert manager.not_ready_because() == manager.deciding.hangs_because() == why

    codes, server = list[int](), mock.Mock(manager=manager)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(engine, "PROBED_S", 0.0)
    engine.end_hanging(server)
    assert codes == [BOOT_ERROR]
    server.close_files.assert_called_once_with()
    assert f"the server ends: {why}" in caplog.text
    goes_on.set()
    manager.close()


@pytest.mark.nightly
def test_a_server_whose_policy_hangs_says_so_and_ends(tmp_path: Path) -> None:
    hangs = FAULTS + "class Hangs(Dynamic):\n    def plan(self, view):\n        while True: pass\n"
    (tmp_path / "faults.py").write_text(hangs)
    with started(mode=f"{tmp_path}/faults.py:Hangs") as (url, process):
        with pytest.raises(ServerError, match="no answer"):
            post(f"{url}/inference", {"prompt": "a", "num_tokens": 1})
        assert process.wait(PATIENCE_S) == BOOT_ERROR
        assert process.stdout is not None
        said = process.stdout.read()
        assert "faults.py:Hangs has been running for more than 60 s" in said, said
