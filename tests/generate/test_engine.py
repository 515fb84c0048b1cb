"""In float32 every mode, batch and cache layout gives the oracle's tokens."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from config.settings import ConfigError
from generate.auto import build
from generate.checkpoint import load_model
from generate.draft_model import DraftModel
from generate.naive import NaiveGenerator
from generate.padded import PaddedGenerator, Rectangle
from generate.sampling import sample
from model import GPT2
from scheduling.errors import Cancelled
from scheduling.inference import Inference, Iteration
from scheduling.policies import Dynamic, Fcfs, NoBatching, Policy, Srpt, Static, Windowed
from scheduling.sampling import Sampling
from tests.counts import nightly_but
from tests.oracle import N_VOCAB, PATHS, POLICIES, SHAPE, Oracle, engine, row, serve, workload
from tests.oracle import model as model  # a fixture
from tests.virtual import make_scheduler

SAMPLINGS = [
    Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.3, top_k=20),
    Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=0.7, top_k=50, top_p=0.8),
]  # fmt: skip


@pytest.fixture(params=nightly_but(["plain", "kernels in one call"], PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asked() -> list[Inference]:
    """Requests in one batch with each way to sample."""
    requests = workload(15, Sampling())
    for i, each in enumerate(requests):
        each.sampling = replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i)
    return requests


@pytest.fixture(scope="module")
def expected(model: GPT2) -> list[list[int]]:
    texts = serve(NoBatching(), Oracle(model, N_VOCAB), asked())
    kinds = {token for tokens in texts for token in tokens}
    assert len(kinds) > 20, "a model that repeats itself proves little"
    assert max(kinds) < N_VOCAB
    assert serve(Dynamic(), NaiveGenerator(model, N_VOCAB), asked()) == texts
    return texts


@pytest.mark.parametrize(("block_size", "n_blocks", "budget"), [
    pytest.param(1, 400, 24, id="1-token blocks"),
    pytest.param(4, 80, 1, id="1-token chunks"),
    pytest.param(16, 20, 7, id="chunks across blocks"),
    pytest.param(64, 5, 1000, id="one block a row"),
    pytest.param(1024, 5, 24, id="Orca's slots"),
    pytest.param(4, 17, 24, id="a tight pool"),
])  # fmt: skip
def test_neither_modes_nor_blocks_nor_chunks_change_a_token(
    model: GPT2, expected: list[list[int]], block_size: int, n_blocks: int, budget: int, path: str
) -> None:
    limits = {"block_size": block_size, "n_blocks": n_blocks, "token_budget": budget}
    for policy in POLICIES if n_blocks == 17 else [Dynamic()]:
        cached = engine(model, n_blocks, block_size, path)
        assert serve(policy, cached, asked(), **limits) == expected, policy


def test_a_scored_prompt_that_fills_its_blocks_leaves_its_batch_alone(
    model: GPT2, path: str
) -> None:
    """Its row stays until its batch ends, and it has no KV slot for another token: it wrote into
    blocks of others, and past the context nothing has a position.
    """

    def asked() -> list[Inference]:
        made = workload(6, Sampling())
        for each, n in zip(made[::2], (16, 1024, 32)):
            each.prompt_ids, each.num_tokens = [i % 250 for i in range(n)], 1
            each.prompt_only = True
        for each in made[1::2]:
            each.num_tokens = 20
        return made

    pool = {"n_blocks": 100, "block_size": 16, "token_budget": 1100}
    expected = serve(NoBatching(), NaiveGenerator(model, N_VOCAB), asked(), **pool)
    for policy in (Static(), Windowed()):
        assert serve(policy, engine(model, 100, 16, path), asked(), **pool) == expected, policy


def test_the_whole_context_of_1024_tokens_is_usable(model: GPT2, path: str) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(N_VOCAB) for _ in range(1020)]
    pool = {"n_blocks": 64, "block_size": 16, "token_budget": 256}
    expected = serve(NoBatching(), Oracle(model, N_VOCAB), [Inference(prompt, 4)], **pool)
    assert serve(Dynamic(), engine(model, 64, 16, path), [Inference(prompt, 4)], **pool) == expected


def test_memory_of_a_kv_block_is_touched_when_it_is_used(model: GPT2, path: str) -> None:
    before = psutil.Process().memory_info().rss
    generator = engine(model, 500_000, 16, path)  # 4 GB of keys and values
    generator.warm_up(max_batch_size=8, token_budget=64, prompt_tokens=64, block_size=16)
    rows = [row(0, 40, [0, 9, 499_999])]
    assert generator.generate(Iteration(rows, running=1, waiting=0, blocks_used=3))
    assert psutil.Process().memory_info().rss - before < 200e6


def test_a_warm_up_runs_the_largest_iteration_in_the_blocks_of_one_prompt(
    model: GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, seen = engine(model, 8, 4, next(iter(PATHS))), list[Iteration]()
    monkeypatch.setattr(generator, "generate", seen.append)
    generator.warm_up(max_batch_size=4, token_budget=10, prompt_tokens=4, block_size=4)
    largest = [(0, 4, [0, 1]), (0, 4, []), (0, 2, []), (0, 1, [])]
    rows = [[(r.start, r.n_tokens, r.blocks) for r in each.rows] for each in seen]
    assert rows == [largest, [(4, 1, [0, 1])], [(0, 1, [])] * 4]


def test_bfloat16_logits_are_near_float32s(model: GPT2, path: str) -> None:
    if PATHS[path][2] == "onednn" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 for this processor")
    # bfloat16 keeps 8 bits: logits of size ~20 differ by some tenths
    low = load_model(SHAPE, None, seed=3, dtype=torch.bfloat16, device="cpu")
    low.load_state_dict(model.state_dict())
    rows = [row(0, 30, list(range(8)))]
    expected = engine(model, 8, 4, path).logits(rows)
    difference = engine(low, 8, 4, path).logits(rows).float() - expected
    assert difference.abs().max() < 0.05 * expected.abs().max()


# ---- rectangles: the oracle's texts in every mode, and as much padding as is counted

WAYS = ("apart", "together")
BUDGETS = [(compact, budget) for compact in (0.0, 0.2, 0.5, 1.0) for budget in (24, 5)]
DEMAND = Dynamic(kv_reservation="demand")


class Counting(PaddedGenerator):
    """Holds what is computed against what the scheduler counts."""

    def generate(self, iteration: Iteration) -> list[int]:
        computed = list[int]()
        hook = self._model.wte.register_forward_pre_hook(lambda _, x: computed.append(len(x[0])))
        ids = super().generate(iteration)
        hook.remove()
        assert sum(computed) == sum(r.n_tokens for r in iteration.rows) + iteration.padding
        return ids


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("compact", "budget"), nightly_but([(0.0, 24), (1.0, 5)], BUDGETS))
def test_every_mode_gives_the_oracles_tokens_and_the_padding_that_is_counted(
    model: GPT2, expected: list[list[int]], way: str, compact: float, budget: int
) -> None:
    others = [(DEMAND, Fcfs()), (Dynamic(prefill="first"), Fcfs()), (DEMAND, Srpt())]
    seen = [0.0, 0.0]
    for policy, order in [*((policy, Fcfs()) for policy in POLICIES), *others]:
        limits = {"token_budget": budget, "n_blocks": 17 if policy is DEMAND else 80}
        requests, engine = asked(), Counting(model, N_VOCAB, sample, way, compact)
        served = serve(policy, engine, requests, order=order, padded=way, **limits)
        assert served == expected, (policy, order)
        seen[0] += sum(each.interruptions.preemptions for each in requests)
        seen[1] += sum(each.interruptions.paused_s for each in requests)
    assert min(seen) > 5, "keys and values are dropped and computed again, and kept while paused"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [Static(), Dynamic()], ids=("static", "dynamic"))
def test_a_cancelled_request_changes_no_other_text(model: GPT2, way: str, policy: Policy) -> None:
    engine = PaddedGenerator(model, N_VOCAB, sample, way)
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


def test_requests_join_a_rectangle_that_has_just_enough_room(model: GPT2) -> None:
    kv = torch.zeros(SHAPE.n_layer, 2, SHAPE.n_head, 9, SHAPE.head_size)
    long, short, *others = (Inference([], 0) for _ in range(4))
    rectangle = Rectangle(model, {long: kv[..., :8, :], short: kv[..., :2, :]}, room=3)
    del rectangle.lines[short]  # one of two lines is free; it has 8 columns, and room for 3 more

    def fits(width: int, compact: float, *lengths: int) -> bool:
        joining = {each: kv[..., :n, :] for each, n in zip(others, lengths)}
        return rectangle.fits(joining, width, compact)

    assert fits(3, 0.0, 8) and fits(1, 0.5)
    assert not (fits(4, 0.0, 8) or fits(3, 0.0, 9) or fits(1, 0.0, 1, 1) or fits(1, 0.49))


# ---- draft tokens of a small model: what the model itself would sample, and its cache

HOW = {
    "greedy": Sampling(),
    "drawn": Sampling(0.8, 40, 0.9),
    "with penalties": Sampling(1.0, frequency_penalty=1.5, min_tokens=5, stop_ids=(3, 7)),
}


@pytest.mark.parametrize("how", HOW)
def test_a_model_accepts_all_that_it_proposed_itself(model: GPT2, how: str) -> None:
    asks, server = workload(12, HOW[how]), engine(model, 80, 4)
    server.drafter = DraftModel(engine(model, 5 * 15, 4), 5, 15, max_tokens=16)
    serve(Dynamic(), server, asks, speculate=4)
    verified = sum(each.drafts.verified for each in asks)
    assert sum(each.drafts.accepted for each in asks) == verified > 60


def test_only_what_the_text_changed_is_computed_again(model: GPT2) -> None:
    computing, passes = engine(model, 2 * 15, 4), list[list[tuple[int, int]]]()
    drafter = DraftModel(computing, 2, 15, max_tokens=16)
    compute = computing.generate

    def generate(iteration: Iteration) -> list[int]:
        passes.append([(row.start, row.n_tokens) for row in iteration.rows])
        return compute(iteration)

    def proposed(*wanted: tuple[Inference, int]) -> list[list[int]]:
        passes.clear()
        return drafter.propose(wanted)

    computing.generate = generate  # type: ignore[method-assign]
    a, b, c = (
        Inference([n] * 20, 30, replace(HOW["drawn"], seed=n), tokens=[n + 1]) for n in range(3)
    )
    [drafts] = proposed((a, 3))
    assert passes == [[(0, 16)], [(16, 5)], [(21, 1)], [(22, 1)]], "the prompt, and two drafts"
    a.tokens += [*drafts, 9]
    [drafts, alone] = proposed((a, 3), (b, 1))
    assert passes[:2] == [[(23, 2), (0, 14)], [(25, 1), (14, 7)]] and len(alone) == 1
    assert passes[2:] == [[(26, 1)]], "a row that has its drafts is not computed"
    a.tokens += [drafts[0], drafts[1] + 1]
    for _ in range(2):  # the first draft was right; and logits come of the last token in any case
        proposed((a, 1))
        assert passes == [[(26, 1)]]
    for other in (c, b):  # in the place of each other, which was not used for longest
        proposed((other, 1))
        assert passes[0] == [(0, 16)]
        proposed((a, 1))
        assert passes == [[(26, 1)]]


def test_a_draft_model_is_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 32, "vocab_size": 257, "n_positions": 512}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(sizes))
    monkeypatch.chdir(tmp_path)
    asked = {"model": "demo", "speculate": 4, "draft": "model:small", "max_model_len": "512"}
    config = build("dynamic", asked, {})
    draft = config.draft_model
    assert config.draft == f"model:{tmp_path / 'small'}" and draft is not None
    assert (draft.n_blocks, draft.shape.n_embd) == (32 * 32, 32)
    beyond = "max_model_len 1024 is beyond the 512 positions of .*small; lower it, or choose"
    with pytest.raises(ConfigError, match=beyond):
        build("dynamic", asked | {"max_model_len": "1024"}, {})
