"""Tokens are the oracle's, whatever a scheduler does: the oracle has no KV cache, and computes each
request alone. In float32, on small pools and on large ones.
"""

from __future__ import annotations

import copy
import itertools
import random
import zlib
from collections import Counter
from typing import get_args

import pytest
import torch
from torch import Tensor

from generate import auto
from generate.attention import KernelAttention
from generate.draft_model import DraftModel
from generate.lora import random_adapter
from generate.sampling import Draws
from model import GPT2
from scheduling.adapters import Adapters, Rule
from scheduling.inference import CachedPrefix, Drafter, Inference
from scheduling.policies import (
    VICTIMS,
    Dynamic,
    Fcfs,
    Mlfq,
    NoBatching,
    Order,
    Policy,
    Prefix,
    Srpt,
)
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling
from tests.counts import nightly_but
from tests.generate.conftest import built_for
from tests.oracle import MAX_TOKENS, N_VOCAB, PATHS, POLICIES, Guesses, Oracle, engine, serve
from tests.oracle import model as model  # a fixture

DEMAND = [Dynamic("demand", victim, watermark=0.0) for victim in VICTIMS]
CASES: list[tuple[Policy, Order]] = [
    *((policy, Fcfs()) for policy in [*POLICIES, *DEMAND]), (Dynamic(), Prefix()),
    *((policy, Srpt()) for policy in DEMAND), (Dynamic(), Mlfq(mlfq_quantum=2)),
    (DEMAND[0], Mlfq(0.5, 2)),
]  # fmt: skip
# each policy, and each order and victim once
OFTEN = [*CASES[:6], (DEMAND[1], Srpt()), (Dynamic(), Prefix()), (DEMAND[0], Mlfq(0.5, 2))]


def conversations(block_size: int = 4) -> list[Inference]:
    """Prompts that begin alike, two of them wholly alike; every other one is sampled greedily."""
    rng = random.Random(11)
    prefixes = [[rng.randrange(N_VOCAB) for _ in range(n)] for n in (33, 16, 0)]
    pairs = itertools.product(prefixes, (1, 5, 12))
    prompts = [[*prefix, *(rng.randrange(N_VOCAB) for _ in range(n))] for prefix, n in pairs]
    prompts.append(prompts[1])
    drawn = (Sampling(seed=0), Sampling(0.8, 40, 0.9, seed=1))
    return [
        Inference(
            ids, 12 + 5 * i % 19, drawn[i % 2], prefix=CachedPrefix(block_keys(ids, block_size))
        )
        for i, ids in enumerate(reversed(prompts))
    ]


@pytest.fixture(scope="module")
def expected(model: GPT2) -> list[list[int]]:
    return serve(NoBatching(), Oracle(model, N_VOCAB), conversations())


@pytest.fixture(scope="module")
def near(model: GPT2) -> Drafter:
    """A model that is almost this one, with fewer places than there are requests."""
    model, rng = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=rng))
    return DraftModel(engine(model, 5 * 20, 4), slots=5, blocks=20, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize(
    "path", nightly_but(["kernels"], ["plain", "kernels", "kernels and onednn"])
)
@pytest.mark.parametrize(("policy", "order"), nightly_but(OFTEN, CASES), ids=str)
def test_tokens_are_those_of_each_request_alone(
    model: GPT2, expected: list[list[int]], near: Drafter, policy: Policy, order: Order, path: str
) -> None:
    seen: Counter[str] = Counter()
    cases = itertools.product((4, 16), (False, True), (3, 60), (0, 3))
    for block_size, shares, spare, speculate in cases:
        asks = conversations(block_size)
        for each in asks if not shares else ():
            each.prefix = None
        n_blocks = spare + max(-(-each.total_tokens // block_size) for each in asks)
        limits = {
            "n_blocks": n_blocks, "block_size": block_size,
            "token_budget": 12 if spare == 60 else 24,
            "max_batch_size": 3 if order.preemptive else 5, "speculate": speculate,
        }  # fmt: skip
        kernels = engine(model, n_blocks, block_size, path)
        kernels.drafter = near if block_size == 16 else Guesses(asks, expected)
        assert serve(policy, kernels, asks, order=order, **limits) == expected, limits
        seen["cached"] += sum(each.cached_tokens for each in asks)
        seen["preempted"] += sum(each.interruptions.preemptions for each in asks)
        seen["recomputed"] += sum(each.interruptions.recomputed_tokens for each in asks)
        seen["paused"] += sum(each.interruptions.paused_s > 0 for each in asks)
        seen["accepted"] += sum(each.drafts.accepted for each in asks)
        seen["rejected"] += sum(each.drafts.verified - each.drafts.accepted for each in asks)
    assert seen["cached"] > 100 and seen["accepted"] > 200 and seen["rejected"] > 50
    assert policy not in DEMAND or (seen["preempted"] > 5 and seen["recomputed"] > 0)
    assert seen["paused"] or not order.preemptive


# of a processor what Linux calls its instructions, and the build that computes as it does
PROCESSORS = {
    "AMX": ("avx512_bf16 amx_bf16", "AMX emulated", torch.bfloat16),
    "AMX, refused": ("avx512_bf16 amx_bf16", "AMX refused", torch.bfloat16),
    "AVX512-BF16": ("avx512_bf16", "AVX512-BF16", torch.bfloat16),
    "AVX2": ("avx2 fma", "AVX2", torch.float32),
    "Arm": ("asimd bf16", "this processor", torch.float32),
}


def by_all_bits(logits: Tensor, draws: Draws, n_vocab: int) -> Tensor:
    """Sample ids that another bit of any logit would change."""
    each = [zlib.crc32(row.contiguous().view(torch.uint8).numpy()) % n_vocab for row in logits]
    return torch.tensor(each)


@pytest.mark.parametrize(
    ("processor", "linear"),
    nightly_but(
        [("AMX", "int8"), ("AVX512-BF16", "kernel"), ("AVX2", "kernel")],
        itertools.product(PROCESSORS, ("kernel", "int8")),
    ),
)
def test_texts_of_auto_are_the_same_in_every_mode_on_every_processor(
    model: GPT2, processor: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instructions, build, dtype = PROCESSORS[processor]
    monkeypatch.setattr(auto, "_instructions", lambda: {*instructions.split()})
    chosen = auto.build("dynamic", {"model": "gpt2"}, {})
    assert (chosen.attention, chosen.linear) == ("kernel", "kernel")
    assert chosen.dtype == str(dtype).removeprefix("torch.")
    monkeypatch.setitem(PATHS, "ours", (KernelAttention, by_all_bits, linear))
    with built_for(build):
        model, seen = copy.deepcopy(model).to(dtype), Counter[str]()
        plain = engine(model, 300, 4, "ours")
        expected = serve(NoBatching(), plain, conversations(), token_budget=300, n_blocks=300)
        for policy, shares, speculate in itertools.product(
            [*POLICIES, DEMAND[0]], (False, True), (0, 3)
        ):
            asks = conversations()
            for each in asks if not shares else ():
                each.prefix = None
            limits = {"n_blocks": 25, "token_budget": 12, "speculate": speculate}
            kernels = engine(model, 25, 4, "ours")
            kernels.drafter = Guesses(asks, expected)
            assert serve(policy, kernels, asks, **limits) == expected, (policy, limits)
            seen["cached"] += sum(each.cached_tokens for each in asks)
            seen["recomputed"] += sum(each.interruptions.recomputed_tokens for each in asks)
            seen["accepted"] += sum(each.drafts.accepted for each in asks)
        assert min(seen["cached"], seen["recomputed"], seen["accepted"]) > 20, seen


@pytest.mark.parametrize("rule", get_args(Rule))
def test_texts_are_those_of_each_adapter_alone(model: GPT2, rule: Rule) -> None:
    adapters = [random_adapter(name, 4, i, model.shape) for i, name in enumerate("abc")]

    def texts(policy: Policy, slots: Adapters, names: str, n_blocks: int = 100) -> list[list[int]]:
        asks = conversations()
        for each, name in zip(asks, names):
            each.adapter = name.strip()
            each.prefix = CachedPrefix(block_keys(each.prompt_ids, 4, adapter=each.adapter))
        generator = engine(model, n_blocks, 4, adapters=adapters, slots=3)
        return serve(policy, generator, asks, adapters=slots, n_blocks=n_blocks)

    names, base = "ab ca bcab", " " * 10
    alone = texts(NoBatching(), Adapters(3), names)
    differ = [one != other for one, other in zip(alone, texts(NoBatching(), Adapters(3), base))]
    assert differ == [name != " " for name in names]
    assert texts(DEMAND[0], Adapters(2, rule), names, n_blocks=22) == alone
