"""What is kept of rows from one iteration to the next comes to what they are without it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from config.shapes import Shape
from generate import rows as under_test
from generate.attention import TritonAttention
from generate.buffers import ALIGNED, Buffer
from generate.cached import PADDING, CachedGenerator
from generate.forced import ForcedAcceptance
from generate.rows import Tables
from generate.sampling import SETTINGS, PassSampler, sample
from model import KVCache
from scheduling.inference import Inference, Iteration, Row
from scheduling.policies import Dynamic, Order, Policy
from scheduling.sampling import Sampling
from tests.counts import examples
from tests.oracle import row as row_of
from tests.virtual import Ask, any_asks, any_order, any_policy, run

BLOCK, QUERIES, TILE, MOST, LONGEST = 4, 4, 8, 64, 64
Tiles = list[tuple[int, int, int, int, Sequence[int]]]


class Plain:
    """An iteration as the model and attention read it, from its rows alone. tiles: first token,
    tokens, tokens before this iteration, position of the first, and blocks up to the last.
    """

    def __init__(self, rows: Sequence[Row], every: bool):
        self.ids, self.positions, self.samples = list[int](), list[int](), list[int]()
        self.tiles = Tiles()
        for row in rows:
            for at in range(row.n_tokens):
                draft = at - (row.n_tokens - len(row.drafts))
                known = draft < 0
                text = row.inference.token(row.start + at) if known else row.drafts[draft]
                if every or (row.samples and draft >= -1):
                    self.samples.append(len(self.ids))
                if at % QUERIES == 0:
                    n, start = min(QUERIES, row.n_tokens - at), row.start if row.blocks else 0
                    blocks = row.blocks[: -(-(start + at + n) // BLOCK)]
                    self.tiles.append((len(self.ids), n, start, start + at, blocks))
                self.ids.append(text)
                self.positions.append(row.start + at)


class Reading:
    """A model, and a kernel of attention, that note what they are given."""

    QUERIES, TILE = QUERIES, TILE

    def __init__(self) -> None:
        self.wte = SimpleNamespace(weight=torch.zeros(1))

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Callable[..., Any], samples: Tensor
    ) -> Tensor:
        self.ids, self.positions, self.samples = (
            each.tolist() for each in (ids, positions, samples)
        )
        attend(0, ids)
        return samples[:, None]

    def paged_attention(
        self, qkv: Tensor, cache: Tensor, tiles: Tensor, tables: Tensor, n_tiles: int, *_: Tensor
    ) -> None:
        assert tiles.data_ptr() % ALIGNED == 0
        self.tiles: Tiles = []
        described = tiles.view(-1, TILE).tolist()
        assert len(described) == len(qkv)
        for first, n, cached, position, table, *spare in described:
            assert spare == [0, 0, 0]
            if n:
                end = table + -(-(position + n) // BLOCK) if table >= 0 else 0
                blocks = tables[max(0, table) : end].tolist()
                self.tiles.append((first, n, cached, position, blocks))
        assert len(self.tiles) <= n_tiles


def engine_and_reader() -> tuple[CachedGenerator, Reading]:
    shape = Shape(n_layer=1, n_head=1, n_embd=16, vocab_size=300)
    attention, reading = (
        TritonAttention(KVCache(shape, 1, BLOCK, torch.float32, "cpu"), MOST, LONGEST), Reading()
    )  # fmt: skip
    attention._kernel = reading  # type: ignore[assignment]
    engine = CachedGenerator(reading, 257, attention, sample, MOST)  # type: ignore[arg-type]
    engine.capture([2, 5, 8], lambda forward: forward)  # reads where it lay then
    return engine, reading


@given(
    any_asks(10, 1, tokens=st.integers(1, 20), streamed=st.booleans()), any_policy(), any_order(),
    st.sampled_from([0, 0, 1, 3]), st.lists(st.floats(0, 1), min_size=1, max_size=3),
    st.integers(12, 60), st.sampled_from([(), (1, 3, 6)]), st.sampled_from([3, 6]),
)  # fmt: skip
@examples(200)
def test_any_schedule_is_read_as_its_rows_are(
    asks: list[Ask], policy: Policy, order: Order, speculate: int, rates: list[float],
    n_blocks: int, sizes: tuple[int, ...], n_rows: int,
) -> None:  # fmt: skip
    """Rows that come and go, chunks, drafts, idle rows, padding, prefix sharing, preemption."""
    assume(not order.preemptive or isinstance(policy, Dynamic))
    engine, reading = engine_and_reader()
    ids = count(1000)

    def check(rows: list[Row], padding: int = 0, every: bool = False) -> None:
        logits = engine.logits(rows, padding, every)[:, 0].tolist()
        padded = [*rows, *[PADDING] * padding]
        plain = Plain(padded, every)
        n = len(plain.ids)
        assert logits == plain.samples
        assert reading.ids[:n] == plain.ids and reading.positions[:n] == plain.positions
        assert not any(reading.ids[n:]) and not any(reading.positions[n:])
        added: Tiles = [(at, 1, 0, 0, []) for at in range(n, len(reading.ids))]
        assert reading.tiles == plain.tiles + added

    def generate(iteration: Iteration) -> list[int]:
        rows = list[Row]()
        for row in iteration.rows:  # no two ids are equal
            row.inference.prompt_ids[:] = range(100, 100 + len(row.inference.prompt_ids))
            rows.append(row._replace(drafts=range(500, 500 + len(row.drafts))))
        check(rows, iteration.padding)
        check(rows[::2], every=True)
        check(rows, iteration.padding)
        return [next(ids) for row in iteration.rows if row.samples for _ in (0, *row.drafts)]

    forced = ForcedAcceptance(generate, rates)
    limits: dict[str, Any] = {"max_batch_size": n_rows, "decoder_batch_sizes": sizes}
    limits |= {"order": order, "n_blocks": n_blocks, "speculate": speculate, "token_budget": 20}
    run(policy, asks, generate=forced.generate, drafter=forced, **limits)


def test_an_idle_row_without_blocks_attends_to_itself_alone() -> None:
    engine, reading = engine_and_reader()
    engine.logits([row_of(9, 1, []), row_of(5, 1, [3, 4])])
    assert reading.positions == [9, 5]
    assert reading.tiles == [(0, 1, 0, 0, []), (1, 1, 5, 5, [3, 4])]


# ---- tables


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each copy's integers."""
    sizes: list[int] = []

    def pinned(values: Tensor, device: torch.device) -> Tensor:
        sizes.append(len(values))
        return values

    monkeypatch.setattr(under_test, "pinned", pinned)
    return sizes


def read(tables: Tables, *blocks: list[int]) -> list[list[int]]:
    begins = tables.begins(blocks).tolist()
    return [tables.tensor[b : b + len(each)].tolist() for b, each in zip(begins, blocks) if b >= 0]


def test_only_what_changed_is_sent(sent: list[int]) -> None:
    tables, rows = Tables(9, 5, torch.device("cpu")), [[10 * i] for i in range(4)]
    for blocks, copies in (
        (rows, [4 * 5]), (rows, []), (rows[1:], []), ([*rows[:2], [], rows[3]], []),
        ([*rows, [7]], [5]), (rows[::-1], []),
    ):  # fmt: skip
        sent.clear()
        assert read(tables, *blocks) == [each for each in blocks if each] and sent == copies
    rows[2] += [21, 22]
    assert read(tables, *rows) == rows
    rows[2][1] = 300  # in place of one that was shared, say
    assert read(tables, *rows) == rows and sent == [5, 5]
    rows[1].clear()
    assert read(tables, *rows) == [rows[0], *rows[2:]] and len(sent) == 2
    rows[1].append(5)
    assert read(tables, *rows) == rows


def test_a_list_in_the_memory_of_one_that_is_gone_is_another(sent: list[int]) -> None:
    tables = Tables(4, 3, torch.device("cpu"))
    for i in range(50):  # Python gives most of them the same memory
        assert read(tables, [i, i + 1]) == [[i, i + 1]]
    assert len(sent) == 50


def test_rows_that_are_gone_leave_their_places(sent: list[int]) -> None:
    tables, rows = Tables(4, 2, torch.device("cpu")), [[i, 100 + i] for i in range(40)]
    for i in range(37):
        assert read(tables, *rows[i : i + 4]) == rows[i : i + 4]
    with pytest.raises(ValueError, match="broadcast"):
        read(tables, [1, 2, 3])
    with pytest.raises(IndexError):
        read(tables, *rows[:5])
    assert read(tables, *rows[:4]) == rows[:4]


def test_a_list_that_is_emptied_gives_its_place_back() -> None:
    """It was lost until many lists had gone, and with none left every later iteration failed."""
    tables, rows, one = Tables(8, 4, torch.device("cpu")), [[i] for i in range(4)], [1]
    assert read(tables, *rows) == rows
    for i in range(30):
        one.clear()
        assert read(tables, one) == []
        one.append(i)
        assert read(tables, one) == [[i]]


def test_what_could_not_be_sent_is_sent_by_the_next_iteration() -> None:
    tables, rows = Tables(3, 2, torch.device("cpu")), [[1, 2], [3], [4]]
    failing = mock.patch.object(under_test, "pinned", side_effect=MemoryError)
    for _ in range(4):
        with failing, pytest.raises(MemoryError):
            read(tables, *rows)
    assert read(tables, *rows) == rows
    rows[1][0] = 30
    with failing, pytest.raises(MemoryError):
        read(tables, *rows)
    rows[0][0], rows[1][0], rows[2][0] = 10, 3, 40
    assert read(tables, *rows) == rows, "one is again what was sent before the error"


# ---- what the sampler is told


@given(st.lists(st.tuples(st.lists(st.integers(0, 5)), st.integers(0, 3)), max_size=8))
def test_the_sampler_is_told_of_the_rows_of_each_iteration(
    iterations: list[tuple[list[int], int]],
) -> None:
    """Whichever of six requests have rows, in whichever order; padding has the same one often."""
    sampler = PassSampler(300, torch.zeros(9, dtype=torch.int64))
    ways = [Sampling(i / 4, top_k=i or None, top_p=0.5 + i / 10, seed=2**63 - i) for i in range(6)]
    pool = [Inference([1], 9, how) for how in ways]
    for places, spare in iterations:
        rows = [pool[i] for i in places]
        told = sampler.settings(rows, len(rows) + spare).tobytes()
        plain = [
            (i / 4, 0.5 + i / 10, i or 300, 2**63 - i, len(pool[i].tokens)) for i in places
        ] + spare * [(0.0, 0.0, 0, 0, 0)]
        assert told == b"".join([SETTINGS.pack(*each) for each in plain])
        for each in rows:
            each.tokens.append(7)


# ---- the buffer


def test_a_buffer_is_sent_as_a_whole_to_places_that_stay() -> None:
    buffer, described = Buffer(96, torch.device("cpu")), np.arange(8, dtype=np.int32)
    with buffer as put:
        first = put(array("q", [1, 2, 3])), put(described)
        assert not any(map(torch.any, first)), "nothing is there before all is"
    assert [each.tolist() for each in first] == [[1, 2, 3], [*range(8)]]
    with buffer as put:
        again = put(array("q", [4, 5, 6])), put(described)
    assert [each.data_ptr() for each in again] == [each.data_ptr() for each in first]
    assert all(each.data_ptr() % ALIGNED == first[0].data_ptr() % ALIGNED for each in again)
    for n, message in ((3, "something else"), (13, "broadcast")):
        with pytest.raises(ValueError, match=message), buffer as put:
            put(array("q", [7] * n))
            raise ValueError("something else failed")
    assert again[0].tolist() == [4, 5, 6]
