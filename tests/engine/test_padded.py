"""The engine of rectangles: the oracle's texts in every mode, and as much padding as is counted."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from config import build
from generate.naive import NaiveGenerator
from generate.padded import PaddedGenerator
from generate.sampling import sample
from model import GPT2
from scheduling.errors import Cancelled
from scheduling.inference import Iteration
from scheduling.policies import Dynamic, Fcfs, NoBatching, Policy, Srpt, Static
from scheduling.sampling import Sampling
from serving import Exchange, Server
from tests.counts import nightly_but
from tests.oracle import N_VOCAB, POLICIES, Oracle, serve, workload
from tests.virtual import make_scheduler
from wire.request import Request

SAMPLED = Sampling(temperature=0.7, top_k=50, top_p=0.8)
WAYS = ("apart", "together")
DEMAND = Dynamic(kv_reservation="demand")


class Counting(PaddedGenerator):
    """Holds what is computed against what the scheduler counts."""

    def generate(self, iteration: Iteration) -> list[int]:
        self.computed = 0
        ids = super().generate(iteration)
        assert self.computed == sum(r.n_tokens for r in iteration.rows) + iteration.padding
        return ids


@pytest.fixture(scope="module")
def expected(model: GPT2) -> list[list[int]]:
    return serve(NoBatching(), Oracle(model, N_VOCAB), workload(14, SAMPLED))


@pytest.fixture
def counted(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make engines that count the tokens in the model's forward pass."""
    forward = GPT2.forward

    def make(way: str, compact: float = 0.5) -> Counting:
        engine = Counting(model, N_VOCAB, sample, way, compact)

        def counting(self: GPT2, ids: Tensor, *others: Any) -> Tensor:
            engine.computed += len(ids)
            return forward(self, ids, *others)

        monkeypatch.setattr(GPT2, "forward", counting)
        return engine

    return make


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compact", nightly_but([0.0, 1.0], [0.0, 0.2, 0.5, 1.0]))
def test_every_mode_gives_the_oracles_tokens_and_the_padding_that_is_counted(
    expected: list[list[int]], counted: Any, way: str, compact: float
) -> None:
    others = [(DEMAND, Fcfs()), (Dynamic(prefill="first"), Fcfs()), (DEMAND, Srpt())]
    seen = [0.0, 0.0]
    for policy, order in [*((policy, Fcfs()) for policy in POLICIES), *others]:
        for budget in (24, 5):
            limits = {"token_budget": budget, "n_blocks": 17 if policy is DEMAND else 80}
            asked = workload(14, SAMPLED)
            served = serve(policy, counted(way, compact), asked, order=order, padded=way, **limits)
            assert served == expected, (policy, order, budget)
            seen[0] += sum(each.interruptions.preemptions for each in asked)
            seen[1] += sum(each.interruptions.paused_s for each in asked)
    assert min(seen) > 5, "keys and values are dropped and computed again, and kept while paused"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [Static(), Dynamic()], ids=("static", "dynamic"))
def test_a_cancelled_request_changes_no_other_text(model: GPT2, way: str, policy: Policy) -> None:
    engine = PaddedGenerator(model, N_VOCAB, sample, way, 0.5)
    expected = serve(NoBatching(), NaiveGenerator(model, N_VOCAB), workload(5, Sampling()))
    asked = workload(5, Sampling())
    scheduler = make_scheduler(policy, max_batch_size=5, padded=way)
    scheduler.enqueue(asked, 0.0)
    for now in range(100):
        iteration, _ = scheduler.schedule(float(now))
        ids = engine.generate(iteration)
        if now == 3:  # while its row is computed
            scheduler.fail([iteration.rows[1].inference], Cancelled(""), float(now))
        scheduler.apply(iteration, ids, float(now))
    assert [each.state.name for each in asked].count("CANCELLED") == 1
    for inference, tokens in zip(asked, expected):
        assert inference.tokens == tokens[: len(inference.tokens)]
        assert inference.error or len(inference.tokens) == inference.num_tokens


@pytest.mark.parametrize("way", WAYS)
def test_a_server_with_rectangles_answers_as_the_cached_one(way: str) -> None:
    """Also n completions of a prompt, which share no keys and values here."""
    flags = {"model": "demo", "dtype": "float32", "max_batch_size": 4, "token_budget": 16}
    answers = []
    for engine in ({}, {"generator": "padded", "padded_prefill": way}):
        server = Server(build("dynamic", flags | engine, {}))
        request = Request([[*range(97, 122)] * 2, [100]], 9, Sampling(1.0), n=3)
        group = Exchange(server, request).group
        server.manager.enqueue(group)
        for inference in group:
            inference.done.wait(30)
        answers.append([inference.tokens for inference in group])
        padding = server.report()["padding_rows"]
        server.close()
    assert answers[0] == answers[1] and padding > 0
