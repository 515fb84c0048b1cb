"""What rows, groups and deadlines are to the scheduler and the engine: what they say of themselves,
and how many are kept.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from generate.attention import PlainAttention
from generate.fake import cost_s
from model import KVCache
from scheduling.errors import InvalidRequest
from scheduling.inference import Inference, Iteration, Row, TokenEvent
from scheduling.policies import Dynamic, Policy, Static, Windowed
from shapes import Shape
from tests.virtual import make_scheduler, step


@pytest.mark.parametrize("blocks", [[0, 5, 2], [3, 1, 5], [2, 3, 4], [5, 4, 3]])
def test_plain_attention_reads_a_rows_own_blocks_in_whatever_order_they_are(
    blocks: list[int],
) -> None:
    """[0, 5, 2] was taken for consecutive, as its first and last are two apart, and block 1,
    another row's, was read.
    """
    shape = Shape(n_layer=1, n_head=2, n_embd=8, vocab_size=300)
    qkv = torch.randn(12, 3, 2, 4, generator=torch.Generator().manual_seed(0))

    def attend(blocks: list[int]) -> torch.Tensor:
        cache = KVCache(shape, 6, 4, torch.float32, "cpu")
        cache.layers[0].fill_(9.0)  # another row's
        rows = [
            Row(Inference([0] * 11, 2), 0, 11, blocks, True, False),
            Row(Inference([0] * 11, 2), 11, 1, blocks, True, False),
        ]
        attention = PlainAttention(cache)
        attention.prepare(rows[:1])(0, qkv[:11])
        return attention.prepare(rows[1:])(0, qkv[11:])

    assert torch.allclose(attend(blocks), attend([0, 1, 2]), atol=1e-6)


def test_who_only_listens_is_answered_with_its_batch_and_a_stream_with_its_own_last_token() -> None:
    """A listener alone once made a request of a static batch end early, as if it were streamed."""
    heard: list[TokenEvent] = []
    scheduler = make_scheduler(Static(), max_batch_size=3)
    listener, stream, long = (
        Inference([0], 1, listener=heard.append),
        Inference([0], 1, listener=heard.append, streamed=True),
        Inference([0], 3),
    )
    scheduler.enqueue([listener, stream, long], now=0.0)
    assert [step(scheduler)[1] for _ in range(3)] == [[stream], [], [listener, long]]


def test_prompts_of_one_token_are_prompts_and_get_no_padding() -> None:
    """Rows that computed one token and sampled were taken for decode rows."""
    scheduler = make_scheduler(Dynamic(), max_batch_size=8, decoder_batch_sizes=[8, 4])
    scheduler.enqueue([Inference([0], 9) for _ in range(3)], now=0.0)
    first, _ = step(scheduler)
    second, _ = step(scheduler)
    assert [
        (iteration.padding, [row.decodes for row in iteration.rows])
        for iteration in (first, second)
    ] == [(0, [False] * 3), (1, [True] * 3)]
    scheduler.enqueue([Inference([0], 9)], now=2.0)
    mixed, _ = step(scheduler)
    assert (mixed.padding, [row.decodes for row in mixed.rows]) == (0, [True, True, True, False])
    one, none = (
        Iteration([Row(Inference([0], 2), start, 1, [0], True, False)], 1, 0, 1) for start in (0, 1)
    )
    assert cost_s(one) > cost_s(none), "a prompt's token costs the same in a prompt of one"


def test_idle_rows_decode() -> None:
    scheduler = make_scheduler(Static(), decoder_batch_sizes=[8])
    scheduler.enqueue([Inference([0] * 5, 1), Inference([0] * 5, 3)], now=0.0)
    step(scheduler)
    iteration, _ = step(scheduler)
    assert [(row.idle, row.decodes) for row in iteration.rows] == [
        (True, True),
        (False, True),
    ] and iteration.padding == 6


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (Static(), 4),
        (Static(compact_batches=True), 4),
        (Windowed(max_batch_delay_ms=1000, batch_size_target=2), 4),
        (Windowed(max_batch_delay_ms=1000, batch_size_target=9, batch_size_limit=3), 3),
        (Windowed(max_batch_delay_ms=1000, batch_size_target=2, batch_size_limit=50), 4),
    ],
)
def test_a_policy_that_never_splits_a_group_says_how_large_one_may_be(
    policy: Policy, limit: int
) -> None:
    """A Static scheduler that was not told the limit besides let a larger group wait for ever."""
    scheduler = make_scheduler(policy, max_batch_size=4)
    with pytest.raises(
        InvalidRequest,
        match=f"Maximum batch size exceeded: {limit + 1} completions in one request, at most "
        f"{limit} in this mode",
    ):
        scheduler.enqueue([Inference([0], 1) for _ in range(limit + 1)], now=0.0)
    assert not scheduler.has_work
    group = [Inference([0], 1) for _ in range(limit)]
    scheduler.enqueue(group, now=0.0)
    assert step(scheduler, now=5.0)[1] == group


def test_answered_requests_are_not_kept_for_their_deadlines() -> None:
    """One request with an early deadline, in flight, kept 20,000 that were answered behind it in
    the heap.
    """

    class Asked(Inference):
        """One that can be seen to be gone."""

    scheduler = make_scheduler(Dynamic(), n_blocks=100_000)
    stays = Inference([0], 100_000, deadline=1e9)
    scheduler.enqueue([stays], now=0.0)
    answered = []
    for n in range(20_000):
        asked = Asked([0], 1, deadline=2e9 + n)
        scheduler.enqueue([asked], now=0.0)
        answered.append(weakref.ref(asked))
        scheduler.expire(0.0)
        step(scheduler)
    del asked
    scheduler.expire(0.0)
    gc.collect()
    assert sum(ref() is not None for ref in answered) < 100
    assert scheduler.next_deadline() == 1e9 and scheduler.expire(1e9) == [stays]
