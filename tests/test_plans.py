"""What a policy says is checked before anything moves; what it may say beyond admitting and
computing is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from scheduling.inference import Inference, State
from scheduling.policies import Dynamic, Order, Plan, Policy, View
from scheduling.scheduler import Scheduler
from simulate import drive
from tests.virtual import make_scheduler


@dataclass(frozen=True)
class Says(Policy):
    """Says what it is told to."""

    what: Callable[[View], Plan]

    def plan(self, view: View) -> Plan:
        return self.what(view)


def prepared(what: Callable[[View], Plan]) -> tuple[Scheduler, list[Inference]]:
    """One row of 4 + 3 tokens runs and has one token, one of 8 + 2 waits; of the 5 blocks of 4
    tokens, 3 are free.
    """
    scheduler = make_scheduler(Dynamic(), n_blocks=5, token_budget=6)
    runs, waits = Inference([0] * 4, 3), Inference([0] * 8, 2)
    scheduler.enqueue([runs], 0.0)
    iteration, _ = scheduler.schedule(0.0)
    scheduler.apply(iteration, [7], 1.0)
    scheduler.enqueue([waits], 1.0)
    scheduler.policy = Says(what)
    return scheduler, [runs, waits]


def both(view: View) -> tuple[Inference, Inference]:
    [runs], [waits] = view.running, view.waiting
    return runs, waits


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        (lambda runs, waits: Plan(admit=[(runs, 7)]), "only what waits can be admitted, and once"),
        (
            lambda runs, waits: Plan(admit=[(waits, 10), (waits, 10)]),
            "only what waits can be admitted, and once",
        ),
        (lambda runs, waits: Plan(admit=[(waits, 13)]), "it needs 1 KV blocks more than are free"),
        (lambda runs, waits: Plan(run=[(waits, 1)]), "only what runs can be computed"),
        (lambda runs, waits: Plan(run=[(runs, 1), (runs, 1)]), "no inference has two rows"),
        (
            lambda runs, waits: Plan(run=[(runs, 2)]),
            "2 tokens of 1 uncomputed ones cannot be computed",
        ),
        (
            lambda runs, waits: Plan(run=[(runs, 0)]),
            "0 tokens of 1 uncomputed ones cannot be computed",
        ),
        (
            lambda runs, waits: Plan(admit=[(waits, 10)], run=[(waits, 7)]),
            "7 charged tokens are more than token_budget 6",
        ),
        (lambda runs, waits: Plan(preempt=[waits]), "only what runs can be preempted"),
        (
            lambda runs, waits: Plan(preempt=[runs], run=[(runs, 1)]),
            "only what runs can be computed",
        ),
    ],
)
def test_an_impossible_plan_is_refused_by_name_and_nothing_has_moved(
    what: Callable[..., Plan], rule: str
) -> None:
    scheduler, [runs, waits] = prepared(lambda view: what(*both(view)))
    with pytest.raises(ValueError, match=rf"the plan of Says.* is impossible: {rule}"):
        scheduler.schedule(1.0)
    assert list(scheduler.running.values()) == [runs] and list(scheduler.waiting.values()) == [
        waits
    ]
    assert scheduler.pool.free_blocks == 3 and runs.preemptions == 0


def test_a_row_of_a_request_level_batch_cannot_be_preempted() -> None:
    scheduler, [runs, _] = prepared(lambda view: Plan(preempt=[*view.running]))

    class Whole(Says):
        request_level = True

    scheduler.policy = Whole(lambda view: Plan(preempt=[*view.running]))
    with pytest.raises(ValueError, match="a row cannot leave a batch that is answered as a whole"):
        scheduler.schedule(1.0)
    assert runs.state is State.RUNNING


def test_who_waits_is_kept_by_arrival_also_after_a_preemption() -> None:
    seen: list[list[Inference]] = []

    def looked(view: View) -> Plan:
        seen.append(view.waiting.oldest)
        return Plan()

    scheduler, [runs, waits] = prepared(lambda view: Plan(preempt=[*view.running]))
    scheduler.schedule(1.0)
    scheduler.policy = Says(looked)
    scheduler.schedule(2.0)
    assert [*scheduler.lobby.queues[0].by_arrival.values()] == [runs, waits] and seen == [[runs]]


def test_more_rows_than_max_batch_size_are_refused() -> None:
    scheduler = make_scheduler(
        Says(lambda view: Plan(admit=[(i, 2) for i in view.waiting])), max_batch_size=2
    )
    scheduler.enqueue([Inference([0], 1) for _ in range(3)], 0.0)
    with pytest.raises(ValueError, match="3 rows are more than max_batch_size 2"):
        scheduler.schedule(0.0)


def test_who_is_preempted_waits_in_its_place_and_computes_everything_again() -> None:
    """At 2 s the first row, which has two tokens, gives way to the second, and comes back when that
    is done.
    """

    @dataclass(frozen=True)
    class GivesWay(Dynamic):
        def plan(self, view: View) -> Plan:
            running = list(view.running)
            if view.now == 2.0:
                return Plan(preempt=running)
            return super().plan(view) if view.now != 2.5 else Plan(wake_at=3.0)

    computed: list[list[tuple[int, int, bool]]] = []
    scheduler = make_scheduler(GivesWay(), max_batch_size=1)
    first, second = Inference([0] * 3, 4), Inference([0], 2)

    def planned(now: float, iteration: Any) -> None:
        computed.append([(row.start, row.n_tokens, row.decodes) for row in iteration.rows])

    # it wakes up at 2.5, when the second comes
    with pytest.raises(RuntimeError, match="neither runs nor waits for anything at 2 s"):
        drive(
            make_scheduler(GivesWay(), max_batch_size=1),
            [(0.0, [Inference([0] * 3, 4)])],
            lambda _: 1.0,
        )
    drive(scheduler, [(0.0, [first]), (2.5, [second])], lambda _: 1.0, planned=planned)
    assert (first.preemptions, first.state, len(first.tokens), first.admitted_at) == (
        1,
        State.FINISHED,
        4,
        0.0,
    )
    # a prompt of three and a token; nothing while both wait; then five known tokens at once, and
    # the last one decodes
    assert [rows for rows in computed if rows] == [
        [(0, 3, False)],
        [(3, 1, True)],
        [(0, 5, False)],
        [(5, 1, True)],
        [(0, 1, False)],
        [(1, 1, True)],
    ]
    assert second.admitted_at == 5.0, "who came first still goes first"
    assert scheduler.pool.free_blocks == scheduler.pool.n_blocks


def test_an_order_says_who_goes_first_and_keeps_groups_together() -> None:
    @dataclass(frozen=True)
    class ByPriority(Order):
        def key(self, inference: Inference) -> int:
            return inference.priority

    scheduler = make_scheduler(Dynamic(), order=ByPriority(), max_batch_size=1)
    late, urgent = ([Inference([0], 1, priority=priority) for _ in range(2)] for priority in (1, 0))
    drive(scheduler, [(0.0, late), (0.0, urgent)], lambda _: 1.0)
    assert [inference.admitted_at for inference in (*urgent, *late)] == [0.0, 1.0, 2.0, 3.0]
