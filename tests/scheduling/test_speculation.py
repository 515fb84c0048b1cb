"""Speculative decoding: how many draft tokens rows verify, what those cost, and that no answer
shows them. Texts of every policy and order are in test_texts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from generate.auto import build
from generate.forced import ForcedAcceptance
from generate.ngram import Ngram
from scheduling.inference import Drafter, Inference, Iteration
from scheduling.planning import rows_to_draft
from scheduling.policies import Dynamic, Fcfs, Mlfq, Order, Policy
from scheduling.scheduler import Scheduler
from server.api.rendering import renderer_of
from server.engine import LocalEngine
from server.request import Request
from simulate import any_ids
from tests.counts import examples
from tests.virtual import Ask, ServedAsks, any_asks, any_order, any_policy, begun, run


def serve(
    asks: Sequence[Ask],
    policy: Policy = Dynamic(),  # noqa: B008  (it is frozen)
    rates: Sequence[float] = (1.0,), **settings: Any,
) -> ServedAsks:  # fmt: skip
    engine = ForcedAcceptance(any_ids, rates)
    return run(policy, asks, generate=engine.generate, drafter=engine, **settings)


def test_drafts_use_what_prompts_leave_of_the_budget_and_end_with_the_request() -> None:
    asks = [Ask(0.0, 1, 9), Ask(0.5, 7, 1)]
    served = serve(asks, speculate=4, token_budget=6)
    # B's prompt takes the whole budget, then one token of it; A has 4 tokens left to draft, then 2
    assert served.chunks == [[1], [1, 6], [5, 1], [2]]
    drafts = served.inferences[0].drafts
    assert drafts.verified == drafts.accepted == 5
    # where decoded tokens count, too, they come before drafts
    served = serve(asks, Dynamic(budget_counts="all"), speculate=4, token_budget=6)
    assert served.chunks == [[1], [1, 5], [4, 2], [3]]


def test_drafts_take_no_block_that_another_row_could_have() -> None:
    """Blocks of four tokens: rejected drafts give theirs back, so that no request is preempted."""
    asks = [Ask(0.0, 4, 8), Ask(0.0, 4, 8)]
    policy = Dynamic("demand", watermark=0.0)
    plain = serve(asks, policy, n_blocks=5)
    served = serve(asks, policy, [0.0], n_blocks=5, speculate=4)
    assert any(row.drafts for _, iteration in served.iterations for row in iteration.rows)
    preempted = [[i.preempted for _, i in each.iterations] for each in (served, plain)]
    assert preempted[0] == preempted[1] and sum(preempted[0]) == 1


@given(
    any_asks(8, 1, tokens=st.integers(1, 20)), any_policy(), any_order(),
    st.sampled_from([1, 3, 7]), st.lists(st.floats(0, 1), min_size=1, max_size=3),
    st.integers(12, 40),
)  # fmt: skip
@examples(200)
def test_every_request_has_its_tokens_within_every_limit(
    asks: list[Ask], policy: Policy, order: Order, speculate: int, rates: list[float], blocks: int
) -> None:
    assume(not order.preemptive or isinstance(policy, Dynamic))
    limits: dict[str, Any] = {"order": order, "token_budget": 9, "n_blocks": blocks}
    served = serve(asks, policy, rates, speculate=speculate, **limits)
    for rows in (iteration.rows for _, iteration in served.iterations):
        assert sum(len(row.drafts) if row.decodes else row.n_tokens for row in rows) <= 9
    for inference in served.inferences:
        assert inference.error or len(inference.tokens) == inference.num_tokens
        assert 0 <= inference.drafts.accepted <= inference.drafts.verified
        assert inference.token_times == sorted(inference.token_times)


class Broken(Drafter):
    def propose(self, wanted: object) -> list[list[int]]:
        raise RuntimeError("out of ideas")


def test_a_drafter_that_raises_costs_speed_alone(caplog: pytest.LogCaptureFixture) -> None:
    served = run(Dynamic(), [Ask(0.0, 1, 3)], drafter=Broken(), speculate=4)
    assert len(served.inferences[0].tokens) == 3
    assert "no draft tokens were proposed; requests are served without them" in caplog.text


def test_drafts_that_were_not_taken_are_none_later() -> None:
    """They may be more than the rows, or the tokens that are left, allow by then."""
    first, second = Inference([0], 9), Inference([0] * 5, 9)
    scheduler = begun(Dynamic(), first, speculate=4, token_budget=5)
    assert scheduler.speculation is not None
    engine = ForcedAcceptance(any_ids, [1.0])
    scheduler.speculation.draft(rows_to_draft(scheduler, 1.0), engine)
    scheduler.enqueue([second], 1.0)
    iteration, _ = scheduler.schedule(1.0)
    assert [row.n_tokens for row in iteration.rows] == [1, 5], "the prompt takes the whole budget"
    scheduler.apply(iteration, [0, 0], 2.0)
    assert len(first.drafts.ids) == 4
    rows_to_draft(scheduler, 2.0)
    assert first.drafts.ids == []


@pytest.mark.parametrize(("policy", "order"), [
    (Dynamic(), Mlfq(mlfq_quantum=2)), (Dynamic(prefill="first"), Fcfs()),
])  # fmt: skip
def test_only_rows_of_the_next_iteration_draft(policy: Policy, order: Order) -> None:
    """With mlfq and two rows a draft model drafted for six at once, four of which were paused."""
    asks = [Ask(float(at), 1 + 5 * at, 9) for at in range(6)]
    drafted: list[set[Inference]] = [set()]

    class Notes(Drafter):
        def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
            drafted[-1] = {inference for inference, _ in wanted}
            return [[0] * k for _, k in wanted]

    def planned(scheduler: Scheduler, iteration: Iteration) -> None:
        assert drafted[-1] <= {row.inference for row in iteration.rows}, "a draft in vain"
        drafted.append(set())

    run(policy, asks, planned, drafter=Notes(), order=order, speculate=2, token_budget=20)
    assert max(map(len, drafted)) == 2


def test_ngram_proposes_what_followed_the_longest_ending() -> None:
    inference = Inference([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 9)
    ngram = Ngram()
    assert ngram.propose([(inference, 3)]) == [[4, 9, 2]]  # 1 2 3, though 2 3 came later
    inference.tokens = [7]
    assert ngram.propose([(inference, 3)]) == [[]]
    inference.tokens += [7, 7]
    assert ngram.propose([(inference, 3)]) == [[7, 7, 7]], "it repeats itself"


REQUESTS = [
    Request([list(b"Raises ValueError if x is not. Raises ValueError if ")], 60, n=2, seed=3),
    Request([list(b"def f(x): return x\ndef g(x): return ")], 60, stop=["turn"], logprobs=2),
    Request([list(b"a b c a b c a b c ")], 40, logprobs=1, echo=True),
]
OWN = [
    {"linear": "kernel"},
    {"linear": "kernel", "dtype": "bfloat16"},
    {"linear": "int8", "kv_dtype": "int8"},
]
# they add a product's terms in another order where there are more rows: log-probabilities differed
# by 9e-7 on an Intel Xeon of 2017, and by 7e-6 of -9.7 without AVX, and the tokens were equal
PYTORCHS = [{"kernels": "plain"}, {"linear": "onednn"}]


@pytest.mark.parametrize(
    ("settings", "near"),
    [*((each, 0.0) for each in OWN), *((each, 1e-5) for each in PYTORCHS)], ids=str,
)  # fmt: skip
def test_answers_are_the_same_with_stops_and_scores(settings: dict[str, Any], near: float) -> None:
    """To the bit with kernels of ours, whichever `auto` would choose on this processor."""
    answers, scores = list[Any](), list[list[float]]()
    for speculate in (0, 6):
        given = {"model": "demo", "dtype": "float32", "speculate": speculate}
        server = LocalEngine(build("static", given | settings, {}))
        exchanges = [renderer_of(server, request) for request in REQUESTS]
        for exchange in exchanges:
            server.manager.enqueue(exchange.group)
        members = [member for exchange in exchanges for member in exchange.group]
        assert all(member.done.wait(60) for member in members)
        texts = [exchange.whole().get("text") for exchange in exchanges]
        answers.append([texts, [(m.tokens, m.finish_reason) for m in members]])
        scored = [score for m in members if m.scores for score in m.scores.of]
        scores.append([n for s in scored for n in (s.logprob, *chain(*s.top))])
        accepted = [member.drafts.accepted for member in members]
        server.close()
    assert answers[0] == answers[1]
    assert scores[0] == pytest.approx(scores[1], rel=near, abs=near) and len(scores[0]) > 200
    assert min(accepted) > 3
