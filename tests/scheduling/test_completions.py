"""Several completions of a prompt: they share its KV blocks, in every mode and on the engine."""

from __future__ import annotations

import random

import pytest

from model import GPT2
from scheduling.errors import Cancelled
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic, NoBatching, Policy, Static
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling
from serving import member_seed
from simulate import drive
from tests.oracle import N_VOCAB, Oracle, engine, model, serve  # noqa: F401
from tests.virtual import Ask, make_scheduler, run, step


# A worked example: blocks of four tokens, eight prompt tokens an iteration, a prompt of 10 with
# three completions of two tokens. The followers wait until the first has computed the two full
# blocks, and compute two tokens each.
#
#     t       0  1      2
#     first   8  2      d
#     others     2 2    d d
def test_the_worked_example_of_n() -> None:
    asks = [Ask(0.0, prompt=10, tokens=2, content=1, n=3)]
    for policy in (Dynamic(), Static(), Dynamic(kv_reservation="demand")):
        served = run(policy, asks, max_batch_size=3, token_budget=8)
        chunks = served.chunks
        assert chunks == [[8], [2, 2, 2], [1, 1, 1]], policy
        used = [iteration.blocks_used for _, iteration in served.iterations]
        assert used[1:] == [5, 5], "two in common, and one each"
        assert served.scheduler.snapshot().prompt_tokens == 10, "a prompt counts once"
    served = run(NoBatching(), asks, token_budget=8)
    alone = [iteration.rows[0].n_tokens for _, iteration in served.iterations]
    assert alone == [8, 2, 1, 2, 1, 2, 1], "one after another they share, too"
    single = [Ask(0.0, prompt=10, tokens=1, content=1, n=3)]
    served = run(Dynamic(), single, max_batch_size=3, token_budget=8)
    chunks = served.chunks
    assert chunks == [[8], [2, 2, 2]], "and when the first is done with its prompt"


def test_followers_go_on_without_a_first_that_has_left() -> None:
    for policy in (Dynamic(), Static()):
        scheduler = make_scheduler(policy, max_batch_size=3, token_budget=8)
        first, *others = Ask(0.0, prompt=10, tokens=2, content=1, n=3).group(4)
        scheduler.enqueue([first, *others], 0.0)
        iteration, _ = scheduler.schedule(0.0)
        scheduler.fail([first], Cancelled("gone"), 0.5)
        scheduler.apply(iteration, [], 1.0)
        for now in range(1, 9):
            step(scheduler, float(now))
        assert [other.state for other in others] == [State.FINISHED] * 2
        assert others[0].cached_tokens == 0, "nobody has what the first had computed"
        assert scheduler.pool.free_blocks == scheduler.pool.n_blocks


def test_followers_do_not_wait_for_a_first_that_gave_way() -> None:
    """It may itself wait for the blocks that they have, and then nobody would go on."""
    demand = Dynamic(kv_reservation="demand", watermark=0.0)
    scheduler = make_scheduler(demand, n_blocks=20, token_budget=4)
    first, other = Ask(0.0, prompt=10, tokens=20, content=1, n=2).group(4)
    scheduler.enqueue([first, other], 0.0)
    for now in range(14):
        step(scheduler, float(now))
    scheduler._preempt(other, 14.0)
    scheduler.forget_prefixes()
    step(scheduler, 14.0)
    assert other.computed == 4, "it has recomputed a part"
    scheduler._preempt(first, 15.0)
    scheduler.pool.allocate(scheduler.pool.free_blocks - 3)
    iteration, _ = scheduler.schedule(15.0)
    assert [row.inference for row in iteration.rows] == [other]


@pytest.mark.parametrize(
    ("asks", "limits"),
    [([Ask(0.0, 4, 8, content=1), Ask(1.0, 13, 10, content=2, n=4)], (4, 8, 10)),
     ([Ask(0.0, 10, 6, content=1, n=3), Ask(1.0, 11, 13, content=1, n=3)], (6, 6, 6))],
)  # fmt: skip
def test_nobody_waits_for_ever_when_completions_give_way(
    asks: list[Ask], limits: tuple[int, int, int]
) -> None:
    """They once waited for a first one that waited for their blocks, and nothing ran."""
    policy = Dynamic("demand", victim="most_computed", watermark=0.2, budget_counts="all")
    rows, budget, blocks = limits
    served = run(policy, asks, max_batch_size=rows, token_budget=budget, n_blocks=blocks)
    assert all(member.state is State.FINISHED for member in served.inferences)


@pytest.mark.parametrize(
    "policy", [Static(), Dynamic(), Dynamic(kv_reservation="demand", watermark=0.0)], ids=str
)
def test_shared_prompts_give_the_texts_of_prompts_of_their_own(
    model: GPT2,  # noqa: F811
    policy: Policy,
) -> None:
    """In float32, drawn, on pools of hardly more than one request's blocks; the oracle shares
    nothing.
    """

    def asks(share: bool) -> list[list[Inference]]:
        rng = random.Random(3)
        groups = []
        for _ in range(5):
            ids = [rng.randrange(N_VOCAB) for _ in range(rng.randint(3, 40))]
            keys = block_keys(ids, 4) if share else None
            members: list[Inference] = []
            for i in range(3):
                leader = members[0] if members and share else None
                drawn = Sampling(0.8, 40, 0.9, seed=member_seed(3, i))
                one = Inference(ids, 9, drawn, keys=keys and [*keys], leader=leader)
                members.append(one)
            groups.append(members)
        return groups

    oracle = Oracle(model, N_VOCAB)
    expected = [serve(NoBatching(), oracle, members) for members in asks(share=False)]
    scheduler = make_scheduler(policy, max_batch_size=5, token_budget=12, n_blocks=42)
    groups = asks(share=True)
    generator = engine(model, 42, 4)
    arrivals = [(float(i), group) for i, group in enumerate(groups)]
    drive(scheduler, arrivals, lambda _: 1.0, generator.generate)
    assert [[member.tokens for member in members] for members in groups] == expected
    assert sum(member.cached_tokens for members in groups for member in members) > 50
