"""Plans of `dynamic` where rows give way, from views made by hand: blocks of 4 tokens."""

from __future__ import annotations

from typing import Any

from scheduling.errors import Cancelled
from scheduling.extensions import LengthPrediction
from scheduling.inference import Inference, State
from scheduling.pauses import PausedRows
from scheduling.policies import Dynamic, Fcfs, Limits, Mlfq, Order, Plan, Srpt, View
from scheduling.policies.lengths import Predictor
from scheduling.policies.preemptive import Level
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Queue, WaitingQueue


def inference(id_: int, prompt: int, blocks: int = 0, predicted: int = 9) -> Inference:
    """A waiting request; with blocks one that runs and decodes, its prompt computed."""
    made = Inference([0] * prompt, 50, id=id_, group=id_, blocks=[*range(blocks)])
    made.standing.predicted_tokens, made.standing.state = predicted, prompt
    if blocks:
        made.computed, made.tokens, made.decodes = prompt, [1], True
        made.state, made.admitted_at = State.RUNNING, 0.0
    return made


def plan(
    order: Order, running: list[Inference], waiting: Inference, free: int = 0, **more: Any
) -> Plan:
    queue = Queue()
    for each in (*running, waiting):
        each.standing.key = order.turn(each)
    queue.add(waiting, by_user=False)
    pool = PrefixCache(99, 4)
    pool.allocate(99 - free)
    limits = Limits(9, 8, 4)
    view = View(0.0, [queue], running, pool, pool.finder(), limits, order, rows=running)
    return Dynamic("demand", watermark=0.0, **more).plan(view)


def test_a_victim_that_was_planned_gives_its_share_of_the_budget_back() -> None:
    a, b, c = inference(0, 2, 1), inference(1, 10, 3), inference(2, 8, 2)
    prompt = inference(3, 30, 9)
    prompt.computed, prompt.decodes, prompt.tokens = 4, False, []
    made = plan(
        Fcfs(), [a, b, c, prompt], inference(4, 1), victim="most_computed", budget_counts="all"
    )
    assert made.preempt == [b]
    assert made.run == [(a, 1), (c, 1), (prompt, 6)], "8 − 2: b's one is theirs again"


def test_none_joins_in_an_iteration_in_which_a_row_gave_way() -> None:
    a, b = inference(0, 2, 1), inference(1, 12, 3)
    made = plan(Fcfs(), [a, b, inference(2, 8, 2)], inference(3, 1), victim="most_computed")
    assert made.preempt == [b] and not made.admit, "though two of its three blocks are free"


def test_by_turns_none_joins_before_an_earlier_one_that_gave_way() -> None:
    a, b = inference(0, 8, 2, predicted=5), inference(1, 8, 3, predicted=10)
    later, sooner = inference(2, 2, predicted=20), inference(2, 2, predicted=7)
    made = plan(Srpt(), [a, b], later)
    assert (made.preempt, made.admit, made.run) == ([b], [], [(a, 1)])
    assert plan(Srpt(), [a, b], sooner).admit == [(sooner, 2)]


def test_by_turns_a_row_whose_turn_is_over_gives_nothing_up_to_a_later_one() -> None:
    a, c = inference(0, 8, 3, predicted=5), inference(1, 8, 2, predicted=10)
    made = plan(Srpt(), [a, c], inference(2, 2, predicted=20))
    assert (made.preempt, made.run) == ([], [(a, 1)]), "c is paused"


def test_by_turns_none_joins_without_budget() -> None:
    prompt = inference(0, 40, 10, predicted=5)
    prompt.computed, prompt.decodes, prompt.tokens = 4, False, []
    made = plan(Srpt(), [prompt], inference(1, 2, predicted=90), free=9)
    assert (made.run, made.admit) == ([(prompt, 8)], [])


def test_a_preempted_request_returns_to_the_first_level_after_its_longest_wait() -> None:
    order = Mlfq(max_wait_s=5.0)
    queue = WaitingQueue(order, 1, [])
    pauses, late = PausedRows(order, queue), inference(0, 2)
    late.standing.state, late.interruptions.preempted_at = Level(2, since=0.0), 1.0
    queue.put(late)
    pauses.wait(late, 1.0)
    for now, level in ((5.9, 2), (6.0, 0)):
        pauses.before_plan(now)
        assert late.standing.state.number == level
    assert late.standing.state.since == 6.0, "behind those that are in that level"


def test_lengths_are_learnt_from_answers_and_not_from_requests_that_were_given_up() -> None:
    class Spy(Predictor):
        learnt: list[Inference] = []  # noqa: RUF012

        def learn(self, inference: Inference) -> None:
            self.learnt.append(inference)

    lengths, answered, gone = LengthPrediction(Spy(), 1), inference(0, 1), inference(1, 1)
    gone.error = Cancelled("gone")
    lengths.end(answered, 1.0)
    lengths.end(gone, 1.0)
    assert Spy.learnt == [answered]
