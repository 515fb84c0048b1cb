"""Several prompts in one request, and several completions of a prompt: each has a seed of its own,
which the answer names, and what is too large is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from model import GPT2
from scheduling.errors import Cancelled
from scheduling.inference import Inference, State
from scheduling.policies import Dynamic, NoBatching, Policy, Static
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling
from serving import member_seed
from simulate import drive
from tests.oracle import N_VOCAB, Oracle, engine, model, serve  # noqa: F401
from tests.sse import events
from tests.virtual import Ask, make_scheduler, run, step

FOUR = {"prompt": ["The file"] * 4, "num_tokens": 12, "temperature": 1.0}


@pytest.fixture
def demo(client_of: Callable[..., FlaskClient]) -> FlaskClient:
    return client_of(model="demo", max_batch_size=4, max_model_len=64)


def answer(client: FlaskClient, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = client.post("/inference", json=body).get_json()
    return found


def test_equal_prompts_of_one_request_are_drawn_apart_and_each_again_alone(
    demo: FlaskClient,
) -> None:
    """Four times the same prompt at temperature 1 once gave four equal texts: the group's members
    shared a seed.
    """
    unseeded, seeded, again = (answer(demo, FOUR | seed) for seed in ({}, {"seed": 7}, {"seed": 7}))
    for group in (unseeded, seeded):
        assert len(set(group["completion"])) > 1 and len(set(group["seed"])) == 4
        for text, seed in zip(group["completion"], group["seed"]):
            alone = answer(demo, FOUR | {"prompt": "The file", "seed": seed})
            assert (alone["completion"], alone["seed"]) == (text, seed)
    assert seeded["completion"] == again["completion"] and seeded["seed"] == again["seed"]
    assert seeded["seed"][0] == 7 and unseeded["completion"] != seeded["completion"]


def test_openais_routes_and_streams_draw_a_group_alike(demo: FlaskClient) -> None:
    plain = answer(demo, FOUR | {"seed": 7})
    *chunks, last = events(demo.post("/inference", json=FOUR | {"seed": 7, "stream": True}).data)
    texts = ["".join(chunk["text"] for chunk in chunks if chunk["index"] == i) for i in range(4)]
    assert texts == plain["completion"] and last["seed"] == plain["seed"]
    asked = {"prompt": FOUR["prompt"], "max_tokens": 12, "seed": 7, "ignore_eos": True}
    choices = demo.post("/v1/completions", json=asked).get_json()["choices"]
    assert [choice["text"] for choice in choices] == plain["completion"]


def test_members_seeds_of_near_groups_do_not_meet() -> None:
    seeds = [member_seed(seed, i) for seed in range(50) for i in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_n_completions_are_those_of_n_requests_with_their_seeds(demo: FlaskClient) -> None:
    """Choice index = prompt · n + i; a prompt counts once."""
    body: dict[str, Any] = {
        "prompt": ["The file", "A list"],
        "num_tokens": 9,
        "temperature": 1.0,
        "seed": 7,
    }
    found = answer(demo, body | {"n": 2})
    assert len(set(found["completion"])) == 4 == len(found["timings"])
    for i, (text, seed) in enumerate(zip(found["completion"], found["seed"])):
        alone = answer(demo, body | {"prompt": body["prompt"][i // 2], "seed": seed})
        assert alone["completion"] == text
    assert found["usage"]["prompt_tokens"] == len("The file") + len("A list")
    assert found["usage"]["completion_tokens"] == 36
    one = answer(demo, body | {"prompt": "A list", "n": 2})
    assert isinstance(one["completion"], list) and len(one["completion"]) == len(one["seed"]) == 2


def test_n_streams_interleave_by_index_on_every_route(
    client_of: Callable[..., FlaskClient],
) -> None:
    demo = client_of(model="demo", max_batch_size=4)
    # 9 tokens of all three are computed before the first is told
    asked = {"num_tokens": 600, "temperature": 1.0, "seed": 7, "n": 3}
    plain = answer(demo, asked | {"prompt": "The file"})
    stream = demo.post("/inference", json=asked | {"prompt": "The file", "stream": True})
    *chunks, last = events(stream.data)
    assert texts_of(chunks) == plain["completion"] and last["seed"] == plain["seed"]
    assert last["usage"] == plain["usage"]
    order = [chunk["index"] for chunk in chunks]
    assert order != sorted(order), "they come as they are computed"
    theirs = {"max_tokens": 600, "temperature": 1.0, "seed": 7, "n": 3, "ignore_eos": True}
    completion = demo.post("/v1/completions", json=theirs | {"prompt": "The file"}).get_json()
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in completion["choices"]] == plain["completion"]
    chat = theirs | {"messages": [{"role": "user", "content": "Hi"}]}
    choices = demo.post("/v1/chat/completions", json=chat).get_json()["choices"]
    chunks = events(demo.post("/v1/chat/completions", json=chat | {"stream": True}).data)
    streamed = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == [choice["message"]["content"] for choice in choices]


def texts_of(chunks: list[dict[str, Any]]) -> list[str]:
    most = max(chunk["index"] for chunk in chunks)
    return [
        "".join(chunk["text"] for chunk in chunks if chunk["index"] == i) for i in range(most + 1)
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": 2.0}, "n: Input should be a valid integer"),
        ({"n": 5, "num_tokens": 1}, "Maximum batch size exceeded: 5 completions in one request"),
    ],
)
def test_an_n_that_cannot_be_served_is_refused(
    client_of: Callable[..., FlaskClient], body: dict[str, Any], said: str
) -> None:
    client = client_of(mode="static", max_batch_size=4)
    response = client.post("/inference", json={"prompt": "hi", "num_tokens": 2} | body)
    assert response.status_code == 400 and said in response.get_json()["error"]["message"]


def test_more_completions_than_a_server_holds_can_never_be_served(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of(max_batch_size=2, max_waiting=3)
    body = {"prompt": ["hi", "you"], "num_tokens": 2, "n": 3}
    error = client.post("/inference", json=body).get_json()["error"]
    assert (error["param"], error["code"]) == ("n", "invalid_request")
    assert error["message"] == "This server holds 5 completions at most; lower n."


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
        chunks = [[row.n_tokens for row in iteration.rows] for _, iteration in served.iterations]
        assert chunks == [[8], [2, 2, 2], [1, 1, 1]], policy
        used = [iteration.blocks_used for _, iteration in served.iterations]
        assert used[1:] == [5, 5], "two in common, and one each"
        assert served.scheduler.snapshot().prompt_tokens == 10, "a prompt counts once"
    served = run(NoBatching(), asks, token_budget=8)
    alone = [iteration.rows[0].n_tokens for _, iteration in served.iterations]
    assert alone == [8, 2, 1, 2, 1, 2, 1], "one after another they share, too"
    single = [Ask(0.0, prompt=10, tokens=1, content=1, n=3)]
    served = run(Dynamic(), single, max_batch_size=3, token_budget=8)
    chunks = [[row.n_tokens for row in iteration.rows] for _, iteration in served.iterations]
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
    [
        (
            [Ask(0.0, 4, 8, content=1), Ask(1.0, 13, 10, content=2, n=4)],
            {"max_batch_size": 4, "token_budget": 8, "n_blocks": 10},
        ),
        (
            [Ask(0.0, 10, 6, content=1, n=3), Ask(1.0, 11, 13, content=1, n=3)],
            {"max_batch_size": 6, "token_budget": 6, "n_blocks": 6},
        ),
    ],
)
def test_nobody_waits_for_ever_when_completions_give_way(
    asks: list[Ask], limits: dict[str, Any]
) -> None:
    """They once waited for a first one that waited for their blocks, and nothing ran."""
    policy = Dynamic("demand", victim="most_computed", watermark=0.2, budget_counts="all")
    served = run(policy, asks, **limits)
    assert all(member.state is State.FINISHED for group in served.groups for member in group)


def test_equal_prompts_of_one_request_share_only_with_their_own_completions(
    client_of: Callable[..., FlaskClient],
) -> None:
    client = client_of()
    body = {"prompt": ["x" * 500] * 2, "num_tokens": 2, "n": 2}
    assert answer(client, body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    told = client.get("/metrics").get_data(as_text=True)
    assert 'vllm:prefix_cache_hits_total{mode="dynamic",model_name="fake"} 0.0' in told


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
