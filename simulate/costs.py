"""What an iteration costs, as a straight line in what it computes, and what is lost around it.

Times are integers, in picoseconds: sums are exact, so that many iterations taken at once come to
what they do one by one. `python -m benchmarks.costs` fits a line to the machine at hand; the form
is Vidur's (Agrawal et al., MLSys 2024, section 4) with the whole forward pass as one operator.
Knows neither torch nor numpy.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from generate import fake
from scheduling.inference import Iteration
from simulate.time import PS, instant

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDER = RESULTS / "costs"
FRONTS = RESULTS / "replicas" / "fronts.json"  # what `benchmarks.fronts` measured


class CostsError(Exception):
    """Costs that cannot be used; the message is one sentence that names the fix."""


class Work(NamedTuple):
    """What an iteration computes, as the terms of a line count it."""

    iteration: int
    row: int  # rows of all kinds, padding too
    context: int  # positions that rows of one token attend, decoding or idle
    prefill: int  # tokens of chunks of prompts
    chunk_context: int  # positions that these attend: n tokens from s on, n·s + n(n + 1)/2


def work(iteration: Iteration) -> Work:
    """What an iteration computes."""
    context = prefill = chunk_context = 0
    for inference, start, n, _, samples, idle, _ in iteration.rows:
        if idle or (samples and n == 1 and start >= len(inference.prompt_ids)):  # `row.decodes`
            context += start + 1
        else:
            prefill += n
            chunk_context += n * start + n * (n + 1) // 2
    rows = len(iteration.rows) + iteration.padding
    return Work(1, rows, context, prefill, chunk_context)


def streams(iteration: Iteration) -> int:
    """Rows whose token is sent at once."""
    return sum(row.inference.streamed and row.samples and not row.idle for row in iteration.rows)


@dataclass(frozen=True, slots=True)
class Line:
    """Picoseconds of each unit of `Work`, none below 0."""

    iteration: int
    row: int = 0
    context: int = 0
    prefill: int = 0
    chunk_context: int = 0

    def of(self, done: Work) -> int:
        return (
            self.iteration
            + self.row * done.row
            + self.context * done.context
            + self.prefill * done.prefill
            + self.chunk_context * done.chunk_context
        )

    def slower(self, factor: float) -> Line:
        return Line(*(round(factor * value) for value in astuple(self)))


@dataclass(frozen=True)
class Costs:
    """What serving costs on one machine with one engine, in picoseconds.

    decode: of iterations of decode rows alone, by their rows and padding, which do not lie on one
    line: a CPU's kernels work in tiles, a GPU has a graph for each decoder batch size. Between two
    numbers of rows lies their interpolation, and outside them the line. source: what a file tells
    besides: hardware, commit, date, the engine's config, residuals.
    """

    name: str
    line: Line
    gap: int = 0  # from an iteration's end to the beginning of the next one, while there is work
    gap_row: int = 0  # the same, for each of its rows
    gap_answer: int = 0  # for each that it answers: its HTTP thread's turns, since it came
    gap_answer_row: int = 0  # so much less, but not below 0, for each row: in long iterations the
    # threads find the time
    gap_stream: int = 0  # once, where it samples for streams: their threads are woken
    gap_stream_row: int = 0  # and for each of them
    request: int = 0  # from the client's sending to the arrival at the server
    answer: int = 0  # from the answer at the server to the client's having it
    request_turn: int = 0  # by which requests that come at once come one after another
    answer_turn: int = 0  # and answers
    decode: Mapping[int, Line] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    def of(self, iteration: Iteration) -> int:
        """How long an iteration takes."""
        done = work(iteration)
        return (self._decode_line(iteration) if not done.prefill else self.line).of(done)

    def following(self, iteration: Iteration) -> tuple[int, int]:
        """How long the next one takes, in which the same rows compute a token each, and by how much
        longer each one after that.

        An idle row computes its last position again and again.
        """
        line, rows = self._decode_line(iteration), iteration.rows
        context = live = 0
        if line.context:
            context = sum([start + (1 if idle else n + 1) for _, start, n, _, _, idle, _ in rows])
            live = [row.idle for row in rows].count(False)
        following = Work(1, len(rows) + iteration.padding, context, 0, 0)
        return line.of(following), live * line.context

    def slower(self, factor: float) -> Costs:
        """Those of an engine that takes so many times as long."""
        decode = {size: line.slower(factor) for size, line in self.decode.items()}
        return replace(self, line=self.line.slower(factor), decode=decode)

    def scaled(self, factor: float) -> Costs:
        """Those of a server of which all takes so many times as long, but HTTP outside of it."""
        gaps = {name: round(factor * getattr(self, name)) for name in _TIMES if "gap" in name}
        return replace(self.slower(factor), **gaps)

    @property
    def uncertainty(self) -> float:
        """Relative standard deviation of a whole run's time around what the costs say, from the
        runs that were held out of their fit (p5, p50, p95, %); 0 of stated costs.
        """
        held_out = self.source.get("residuals", {}).get("held_out", {})
        least, *_, most = held_out.get("of_runs_percent", (0.0, 0.0))
        return float(most - least) / 100 / (2 * 1.645)

    def between(self, iteration: Iteration, answered: int) -> int:
        """From an iteration's end to the beginning of the next one, while there is work.

        answered: by it.
        """
        rows = len(iteration.rows) + iteration.padding
        gap = self.gap + self.gap_row * rows
        if answered:
            gap += answered * max(0, self.gap_answer - self.gap_answer_row * rows)
        if (self.gap_stream or self.gap_stream_row) and (n := streams(iteration)):
            gap += self.gap_stream + self.gap_stream_row * n
        return gap

    def _decode_line(self, iteration: Iteration) -> Line:
        return self._by_rows.get(len(iteration.rows) + iteration.padding, self.line)

    @functools.cached_property
    def _by_rows(self) -> Mapping[int, Line]:
        found = dict(self.decode)
        for (few, least), (many, most) in pairwise(sorted(self.decode.items())):
            for n in range(few + 1, many):
                terms = zip(astuple(least), astuple(most))
                found[n] = Line(*(a + (b - a) * (n - few) // (many - few) for a, b in terms))
        return found


FAKE = Costs(
    "fake",
    Line(
        iteration=round(fake.ITERATION_S * PS),
        row=round(fake.ROW_S * PS),
        prefill=round(fake.PREFILL_TOKEN_S * PS),
    ),
)
SECOND = Costs("second", Line(iteration=PS))  # an iteration a second, as in worked examples
STATED = {costs.name: costs for costs in (FAKE, SECOND)}
_TIMES = (
    "gap", "gap_row", "gap_answer", "gap_answer_row", "gap_stream", "gap_stream_row", "request",
    "answer", "request_turn", "answer_turn",
)  # fmt: skip


def save(costs: Costs, path: Path) -> None:
    """Write a file that `load` reads; it goes by the file's name."""
    found: dict[str, Any] = {
        "unit": "picoseconds",
        "line": asdict(costs.line),
        "decode": {str(size): asdict(line) for size, line in costs.decode.items()},
        **{name: getattr(costs, name) for name in _TIMES},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | dict(costs.source), indent=1) + "\n")


def load(name: str | Path) -> Costs:
    """Those of `STATED`, a file of results/costs by its name, or any by its path.

    Raises CostsError.
    """
    if name in STATED:
        return STATED[str(name)]
    path = Path(name) if str(name).endswith(".json") else FOLDER / f"{name}.json"
    try:
        found = json.loads(path.read_text())
        found.pop("unit")
        return Costs(
            path.stem,
            _line(found.pop("line")),
            decode={int(size): _line(line) for size, line in found.pop("decode").items()},
            **{time: _picoseconds(found.pop(time, 0)) for time in _TIMES},
            source=found,
        )
    except OSError:
        names = ", ".join([*STATED, *sorted(each.stem for each in FOLDER.glob("*.json"))])
        raise CostsError(
            f"there are no costs {str(name)!r}; name one of {names}, a file that ends in .json, or "
            f"measure this machine's with python -m benchmarks.costs"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostsError(
            f"{path} holds no costs ({type(error).__name__}: {error}); measure them again with "
            f"python -m benchmarks.costs"
        ) from None


def _line(terms: Mapping[str, Any]) -> Line:
    return Line(**{each.name: _picoseconds(terms[each.name]) for each in fields(Line)})


def _picoseconds(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of picoseconds")
    return value


def through(name: str, costs: Costs) -> Costs:
    """The costs of a server that is asked through a front end: a request takes longer by what one
    token takes longer than at a plain server, half of it before the server and half behind.
    """
    took = {
        case["front"]: statistics.fmean(each["request_ms"] for each in case["seeds"])
        for case in json.loads(FRONTS.read_text())["costs"]
    }
    half = instant((took[name] - took["plain"]) / 2e3)
    return replace(costs, request=costs.request + half, answer=costs.answer + half)
