"""The requests of a trace file: in any form, scaled, without those that no server takes.

Where only lengths were recorded, prompts are random ids: equal where hash ids are equal, and each
turn's in a conversation are the beginning of the next turn's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from client import draws
from client.draws import MOST, TokenIds, WorkloadError
from client.formats import CountTokens, RecordedRow, about_tokens, rows
from client.results import Json
from client.traces import Request, Trace, lines_of


@dataclass(frozen=True)
class Context:
    """The longest request, prompt and completion, that each server takes."""

    tokens: int
    count: CountTokens = about_tokens


@dataclass(frozen=True)
class TraceFile:
    """--trace, and the flags that say how it is read. most: requests, the first of the file."""

    path: Path
    arrival: str | None = None
    seed: int = 0
    most: int | None = None
    lengths: str | None = None
    scale: Fraction = Fraction(1)
    time_unit: str | None = None

    def requests(self, context: Context | None = None) -> tuple[Trace, Json]:
        """Return the requests that fit into the context, and their words in a report.

        Raises WorkloadError.
        """
        where = f"as in {self.path}"
        words = {"lengths": self.lengths or where, "arrival": self.arrival or where}
        if self.scale != 1:
            words["scale_tokens"] = f"{float(self.scale):g}"
        count, of_prompts = context.count if context else about_tokens, bool(self.lengths)
        read = rows(self.path, lines_of(self.path), of_prompts, self.time_unit, count)
        recorded = [*itertools.islice(read, self.most)]
        served = self._sized([r for r in recorded if (r.text or r.tokens) and r.num_tokens != 0])
        left = {"without tokens": len(recorded) - len(served)}
        if context is not None:
            fitting = [*_fitting(served, context)]
            left[f"beyond the context of {context.tokens:,}"] = len(served) - len(fitting)
            served = fitting
        if why := ", ".join(f"{many:,} {text}" for text, many in left.items() if many):
            words["left_out"] = f"{sum(left.values()):,} of {len(recorded):,} requests ({why})"
        if not served:
            if not why:
                raise self._error("it holds no requests")
            fix = "add --scale-tokens 0.1, or a larger --max-model-len"
            if any(row.request or row.text is not None for row in recorded):
                fix = "give servers a larger --max-model-len, or the trace shorter texts"
            if left["without tokens"] == len(recorded):
                fix = "give requests with a token or more of prompt and completion"
            raise self._error(f"it holds no requests that can be served: {why}; {fix}")
        return self._sent(_trace(served, self.scale), served), words

    def _error(self, sentence: str) -> WorkloadError:
        return WorkloadError(f"{self.path}: {sentence}")

    def _sized(self, recorded: Sequence[RecordedRow]) -> list[RecordedRow]:
        """Return the rows by time with the lengths that are asked for. Raises WorkloadError."""
        if self.lengths:
            rng = np.random.default_rng([self.seed, 15])
            for row, drawn in zip(recorded, draws.lengths(self.lengths)(rng, len(recorded))):
                row.num_tokens = int(drawn)
        if without := [row for row in recorded if row.num_tokens is None]:
            raise self._error(
                f"{len(without):,} of {len(recorded):,} requests have no completion lengths; add "
                f"--lengths, such as fixed:100{_or_mend(without, recorded)}"
            )
        sized = [*recorded] if any(row.request for row in recorded) else _conversations(recorded)
        for row in sized if self.scale != 1 else ():
            if row.request or row.text is not None:
                raise self._error("its prompts are not of lengths alone; leave out --scale-tokens")
            row.tokens = math.ceil(row.tokens * self.scale)
            if not self.lengths:
                row.num_tokens = math.ceil((row.num_tokens or 0) * self.scale)
        return sized

    def _sent(self, trace: Trace, served: Sequence[RecordedRow]) -> Trace:
        """Return a trace with the arrivals that are asked for. Raises WorkloadError."""
        if self.arrival:
            return trace.sent_as(self.arrival, self.seed)
        if np.isnan(trace.at).any():
            mend = _or_mend([row for row in served if row.at is None], served)
            raise self._error(
                f"it does not say when to send; add --arrival, such as poisson:2{mend}"
            )
        if trace.at.max() > MOST:
            raise self._error("its times are too far apart; name their unit, --time-unit ms or us")
        return trace


def _or_mend(without: Sequence[RecordedRow], of: Sequence[RecordedRow]) -> str:
    """Return another way on, where some rows alone lack a value."""
    return f", or mend line {without[0].line}" if len(without) < len(of) else ""


def _conversations(recorded: Sequence[RecordedRow]) -> list[RecordedRow]:
    """Number rows by time, with the turns of a session one after another.

    A turn waits for as long as after the answer before it, or if the end of that was not recorded,
    after the request before it.
    """
    talks: dict[Any, list[RecordedRow]] = {}
    for k, row in enumerate(recorded):
        talks.setdefault((row.session,) if row.session else k, []).append(row)
    for talk in talks.values():
        talk.sort(key=lambda row: (row.turn, math.inf if row.at is None else row.at))
    ordered: list[RecordedRow] = []
    for talk in sorted(talks.values(), key=lambda talk: talk[0].at or 0.0):
        before, stream = talk[0], len(ordered)
        before_at = first_at = before.at
        for row in talk:
            row.id, row.stream = len(ordered), stream
            if row is not before:
                gap = (row.at or 0.0) - (before_at or 0.0) - before.elapsed
                row.think_s = round(max(0.0, gap if row.delay is None else row.delay) / 1e6, 6)
                row.after, before_at, row.at = before.id, row.at, first_at
                if row.text is not None:
                    row.text = f"\n{row.own}"
                elif row.adds:
                    row.tokens += before.tokens + (before.num_tokens or 0)
                    row.blocks = before.blocks
            ordered.append(before := row)
    return ordered


def _fitting(served: Sequence[RecordedRow], context: Context) -> Iterator[RecordedRow]:
    """Yield the rows that fit into the context, without turns after one that does not."""
    totals: dict[int | None, int] = {None: 0}
    for row in served:
        if row.after in totals:
            total = row.tokens + (row.num_tokens or 0)
            if row.text is not None:  # it goes on from all before it
                total += totals[row.after] + context.count(row.text)
            if total <= context.tokens:
                totals[row.id] = total
                yield row


def _trace(served: Sequence[RecordedRow], scale: Fraction) -> Trace:
    """Return the rows as requests, whose ids are made at each access."""
    start = min((row.at for row in served if row.at is not None), default=0.0)
    requests = []
    for row in served:
        request = row.request or Request.model_construct(
            id=row.id, at=math.nan if row.at is None else round((row.at - start) / 1e6, 6),
            prompt=row.text, seed=row.id, after=row.after, think_s=row.think_s,
        )  # fmt: skip
        requests.append(request.model_copy(update={"num_tokens": row.num_tokens}))
    make = functools.partial(_request, requests, served, scale)
    return replace(Trace.of(requests), make=make)


def _request(
    requests: Sequence[Request], served: Sequence[RecordedRow], scale: Fraction, i: int
) -> Request:
    row, request = served[i], requests[i]
    if row.request or row.text is not None:
        return request
    return request.model_copy(update={"prompt_ids": _prompt(row, scale)})


def _prompt(row: RecordedRow, scale: Fraction) -> list[int]:
    """Return as many ids as a row has tokens: those of its blocks, and then of its stream."""
    ids: list[int] = []
    size, k = row.block * scale, 0
    while len(ids) < row.tokens:
        key = (row.blocks[k], 7) if k < len(row.blocks) else (row.stream, k, 16)
        ids += _block(key, math.ceil(size))[: math.ceil((k + 1) * size) - len(ids)]
        k += 1
    return ids[: row.tokens]


@functools.lru_cache(4096)
def _block(key: tuple[int, ...], n: int) -> list[int]:
    """Return the ids of a block, the same wherever it occurs, in this trace or another."""
    [ids] = TokenIds(np.random.default_rng(key), [n])
    return ids
