"""KV blocks on demand: which request is preempted, at which cost. Texts: test_texts.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from scheduling.errors import Cancelled
from scheduling.inference import Inference, State
from scheduling.pauses import PromotedRows
from scheduling.policies import VICTIMS, Dynamic, Fcfs, Limits, Mlfq, Order, Plan, Srpt, View
from scheduling.policies.lengths import LengthPrediction, Predictor
from scheduling.policies.preemptive import Level
from scheduling.prefix_cache import PrefixCache
from scheduling.queue import Queue, WaitingQueue
from scheduling.scheduler import Scheduler
from simulate import drive
from tests.virtual import Ask, begun, run


def demand(victim: str = "newest", watermark: float = 0.0) -> Dynamic:
    return Dynamic(kv_reservation="demand", victim=victim, watermark=watermark)


# A worked example: two rows, an iteration per second, three blocks of four tokens.
#
#     request   arrives   prompt   tokens
#     A         0         4        5         its fifth and its ninth token need a block more
#     B         0         4        5
#
#     t       0 1 2 3 4 5 6 7 8 9
#     whole   A A A A A B B B B B        A's whole life is three blocks: B waits for it
#     demand  A A A A A B B B B          at 1 A takes the third block, and B, which needs one too,
#             B         (b)              gives way; at 5 it recomputes 4 + 1 tokens in one iteration
EXAMPLE = [Ask(0.0, prompt=4, tokens=5), Ask(0.0, prompt=4, tokens=5)]


def test_the_worked_example() -> None:
    whole = run(Dynamic(), EXAMPLE, n_blocks=3)
    assert " ".join(whole.batches) == "A A A A A B B B B B"
    found = run(demand(), EXAMPLE, n_blocks=3)
    assert " ".join(found.batches) == "AB A A A A B B B B"
    [a], [b] = found.groups
    assert (a.interruptions.preemptions, b.interruptions.preemptions, b.admitted_at) == (0, 1, 0.0)
    assert (b.interruptions.preempted_s, b.interruptions.recomputed_tokens) == (4.0, 4)
    assert b.token_times == [1.0, 6.0, 7.0, 8.0, 9.0], "it goes on where it stood"
    again = [row for _, iteration in found.iterations for row in iteration.rows if row.recomputed]
    assert [(row.start, row.n_tokens, row.recomputed) for row in again] == [(0, 5, 4)]
    assert found.scheduler.snapshot().prompt_tokens == 8, "no prompt token is counted twice"


def three(tokens: list[int], **limits: int) -> tuple[Scheduler, list[Inference]]:
    """Rows that have computed so many tokens; nothing is free, and the first needs a block."""
    rows = [Inference([0] * n, 9) for n in tokens]
    return begun(demand(), *rows, max_batch_size=3, n_blocks=sum(tokens) // 4, **limits), rows


@pytest.mark.parametrize(
    ("victim", "gone"), [("newest", 2), ("least_computed", 1), ("most_computed", 2)]
)
def test_who_gives_way(victim: str, gone: int) -> None:
    scheduler, rows = three([8, 4, 12])
    scheduler.victim = VICTIMS[victim]()
    scheduler.schedule(1.0)
    waiting = [i for i, row in enumerate(rows) if row.state is State.WAITING]
    assert gone in waiting and 0 not in waiting
    assert all(row.computed == 0 and not row.blocks for row in scheduler.waiting.values())


def test_a_head_of_queue_joins_only_if_all_that_is_known_of_it_fits_besides_the_watermark() -> None:
    """12 of 20 blocks are taken; a prompt of 28 tokens needs 7, of 32 it needs 8."""
    for tokens, share, joins in ((28, 0.05, True), (32, 0.05, False), (32, 0.0, True)):
        settings = {"steps": 6, "n_blocks": 20, "token_budget": 8}
        scheduler = begun(demand(watermark=share), Inference([0] * 45, 3), **settings)
        second = Inference([0] * tokens, 1)
        scheduler.enqueue([second], 6.0)
        scheduler.schedule(6.0)
        assert (second.state is State.RUNNING) == joins
        assert len(second.blocks) == (2 if joins else 0), "blocks for the chunk alone"
    idle = run(demand(watermark=0.9), [Ask(0.0, prompt=30, tokens=3)], n_blocks=9)
    assert idle.answered_at == [3.0], "an idle pool bars none"


@pytest.mark.parametrize("reservation", ["whole", "demand"])
@pytest.mark.parametrize(("counts", "chunks"), [("prefill", [8, 4]), ("all", [6, 6])])
def test_a_budget_may_count_decoded_tokens_too(
    reservation: Literal["whole", "demand"], counts: Literal["prefill", "all"], chunks: list[int]
) -> None:
    """Two rows decode when a prompt of 12 comes; the budget is 8."""
    asks = [Ask(0.0, prompt=2, tokens=9), Ask(0.0, prompt=2, tokens=9), Ask(1.0, prompt=12)]
    policy = Dynamic(kv_reservation=reservation, budget_counts=counts)
    served = run(policy, asks, max_batch_size=3, token_budget=8)
    rows = [row for _, iteration in served.iterations for row in iteration.rows]
    assert [row.n_tokens for row in rows if row.inference is served.inferences[2]] == chunks


def test_a_budget_that_counts_every_token_and_is_smaller_than_the_batch_serves_the_first() -> None:
    asks = [Ask(0.0, prompt=1, tokens=3) for _ in range(3)]
    policy = Dynamic(kv_reservation="demand", budget_counts="all")
    served = run(policy, asks, max_batch_size=3, token_budget=2)
    assert served.batches == ["AB", "AB", "AB", "C", "C", "C"]
    asked = [Inference([0], 2) for _ in range(3)]
    scheduler = begun(policy, *asked, max_batch_size=3, token_budget=3)
    with pytest.raises(ValueError, match="3 charged tokens are more than token_budget 2"):
        scheduler.limits = replace(scheduler.limits, token_budget=2)
        scheduler.policy = Unbounded(kv_reservation="demand", budget_counts="all")
        scheduler.schedule(1.0)


class Unbounded(Dynamic):
    """Says of itself that it counts every token, and does not."""

    def plan(self, view: View) -> Plan:
        return Plan(run=[(inference, 1) for inference in view.running])


def test_a_preempted_request_is_cancelled_and_expires_like_any_other() -> None:
    for late in (True, False):
        scheduler, rows = three([8, 8, 8])
        scheduler.schedule(1.0)
        again = rows[2]
        assert again.state is State.WAITING and again.tokens == [7]
        if late:
            again.deadline = 2.0
            scheduler._deadlines.add(2.0, again)
            ended = scheduler.expire(3.0)
        else:
            ended = scheduler.fail([again], Cancelled("gone"), 3.0)
        assert ended == [again] and again not in scheduler.waiting.values()
        assert again.interruptions.preempted_s == 2.0
        drive(scheduler, [], lambda _: 1.0)
        assert scheduler.pool.free_blocks == scheduler.pool.n_blocks


# ---- plans where rows give way, from views made by hand


def inference(id_: int, prompt: int, blocks: int = 0, predicted: int = 9) -> Inference:
    """A waiting request; with blocks one that runs and decodes, its prompt computed."""
    made = Inference([0] * prompt, 50, id=id_, group=id_, blocks=[*range(blocks)])
    made.standing.predicted_tokens, made.standing.state = predicted, prompt
    if blocks:
        made.computed, made.tokens, made.decodes = prompt, [1], True
        made.state, made.admitted_at = State.RUNNING, 0.0
    return made


def begun_prompt(*args: int, **more: int) -> Inference:
    """One that runs, of whose prompt four tokens are computed."""
    made = inference(*args, **more)
    made.computed, made.decodes, made.tokens = 4, False, []
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
    victim = VICTIMS[more.get("victim", "newest")]()
    view = View(0.0, [queue], running, pool, pool.finder(), limits, order, victim, rows=running)
    return Dynamic("demand", watermark=0.0, **more).plan(view)


def test_a_victim_that_was_planned_gives_its_share_of_the_budget_back() -> None:
    a, b, c = inference(0, 2, 1), inference(1, 10, 3), inference(2, 8, 2)
    prompt = begun_prompt(3, 30, 9)
    how: dict[str, Any] = {"victim": "most_computed", "budget_counts": "all"}
    made = plan(Fcfs(), [a, b, c, prompt], inference(4, 1), **how)
    assert made.preempt == [b]
    assert made.run == [(a, 1), (c, 1), (prompt, 6)], "8 − 2: b's one is theirs again"
    made = plan(Fcfs(), [a, b, c], inference(3, 1), victim="most_computed")
    assert made.preempt == [b] and not made.admit, "none joins, though two of its blocks are free"


def test_by_turns_none_joins_before_an_earlier_one_or_without_budget() -> None:
    a, b = inference(0, 8, 2, predicted=5), inference(1, 8, 3, predicted=10)
    later, sooner = inference(2, 2, predicted=20), inference(2, 2, predicted=7)
    made = plan(Srpt(), [a, b], later)  # than b, which gave way
    assert (made.preempt, made.admit, made.run) == ([b], [], [(a, 1)])
    assert plan(Srpt(), [a, b], sooner).admit == [(sooner, 2)]
    a, c = inference(0, 8, 3, predicted=5), inference(1, 8, 2, predicted=10)
    made = plan(Srpt(), [a, c], later)
    assert (made.preempt, made.run) == ([], [(a, 1)]), "c is paused, and keeps its blocks"
    prompt = begun_prompt(0, 40, 10, predicted=5)
    made = plan(Srpt(), [prompt], inference(1, 2, predicted=90), free=9)
    assert (made.run, made.admit) == ([(prompt, 8)], [])


def test_a_preempted_request_returns_to_the_first_level_after_its_longest_wait() -> None:
    order = Mlfq(max_wait_s=5.0)
    queue = WaitingQueue(order.place, 1, by_user=False)
    pauses, late = PromotedRows(order, 5.0), inference(0, 2)
    pauses.attach(SimpleNamespace(queue=queue))
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
