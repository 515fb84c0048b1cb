"""Costs of an iteration: a straight line in what it computes, and the time that is lost around it.

Times are whole picoseconds: sums are exact, so that iterations take as long together as one by one.
`python -m simulate.measure_costs` fits a line to the machine at hand; the form is Vidur's
(Agrawal et al., MLSys 2024, section 4) with the whole forward pass as one operator. Knows neither
torch nor numpy.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from config.reading import read_json
from generate import fake
from scheduling.inference import Iteration
from simulate import roofline
from simulate.loop import PS

MOST_S = 10**9  # beyond it, a simulation never ends
FOLDER = Path(__file__).resolve().parents[1] / "results" / "costs"


class CostsError(Exception):
    """Costs that cannot be used; the message is one sentence that names the fix."""


class Work(NamedTuple):
    """Amounts that an iteration computes, one for each term of a `Line`."""

    iteration: int
    row: int  # rows of all kinds, padding too; a draft token counts as a row
    context: int  # positions that decode rows, their draft tokens and idle rows attend
    prefill: int  # tokens of chunks of prompts
    chunk_context: int  # positions that these attend: n tokens from s on, n·s + n(n + 1)/2


def work(iteration: Iteration) -> Work:
    """Count what an iteration computes."""
    context = prefill = chunk_context = n_drafts = 0
    for inference, start, n, _, samples, idle, _, drafts in iteration.rows:
        if idle or (samples and n == 1 and start >= len(inference.prompt_ids)):  # `row.decodes`
            context += start + 1
            continue
        attended = n * start + n * (n + 1) // 2
        if drafts:
            n_drafts += n - 1
            context += attended
        else:
            prefill += n
            chunk_context += attended
    rows = len(iteration.rows) + iteration.padding + n_drafts
    return Work(1, rows, context, prefill, chunk_context)


def streams(iteration: Iteration) -> int:
    """Count the rows whose token is sent at once."""
    return sum(row.inference.streamed and row.samples and not row.idle for row in iteration.rows)


@dataclass(frozen=True, slots=True)
class Line:
    """Picoseconds of each unit of `Work`, none below 0."""

    iteration: int
    row: int = 0
    context: int = 0
    prefill: int = 0
    chunk_context: int = 0

    def of(self, work: Work) -> int:
        attended = self.context * work.context + self.chunk_context * work.chunk_context
        return self.iteration + self.row * work.row + self.prefill * work.prefill + attended

    def slower(self, factor: float) -> Line:
        return Line(*(round(factor * value) for value in astuple(self)))


@dataclass(frozen=True)
class Costs:
    """Costs of serving on one machine with one engine, in picoseconds.

    decode: lines of iterations of decode rows alone, by the number of rows and padding. They do not
    lie on one line: a CPU's kernels work in tiles, a GPU has a graph for each decoder batch size.
    Between two numbers of rows lies their interpolation, and outside them holds `line`. prompts:
    the time that chunks of prompts add to that of their iteration's rows, all taken as decode rows;
    None: `line` holds for iterations with prompts. source: hardware, commit, date, the engine's
    config and residuals, of costs that were fitted; `estimate` of those that were not, in words.
    """

    name: str
    line: Line
    gap: int = 0  # from an iteration's end to the beginning of the next one, while there is work
    gap_row: int = 0  # for each of its rows
    gap_answer: int = 0  # for each request that it answers: turns of its HTTP thread
    gap_answer_row: int = 0  # less for each row, down to 0: threads run during long iterations
    gap_stream: int = 0  # after an iteration that samples for streams, whose threads are woken
    gap_stream_row: int = 0  # for each of these streams
    request: int = 0  # from the client's sending to the arrival at the server
    answer: int = 0  # from the answer at the server to its arrival at the client
    request_turn: int = 0  # between the arrivals of requests that are sent at once
    answer_turn: int = 0  # between their answers
    decode: Mapping[int, Line] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    load: int = 0  # for each adapter that is loaded before an iteration
    adapter_token: int = 0  # for each token of a row with an adapter
    least: int = 0  # an iteration's least, beside what it attends: to read the weights
    prompts: Line | None = None

    def of(self, iteration: Iteration) -> int:
        """Return the time that an iteration takes."""
        amounts = work(iteration)
        time = self.of_work(amounts)
        if self.load or self.adapter_token:
            tokens = sum([row.n_tokens for row in iteration.rows if row.inference.adapter])
            time += self.load * len(iteration.loads) + self.adapter_token * tokens
        return time

    def following(self, iteration: Iteration) -> tuple[int, int]:
        """Return the time that the next iteration takes, in which the same rows compute a token
        each, and the time by which each later one is longer than the one before it.

        An idle row computes its last position again and again.
        """
        rows, n = iteration.rows, len(iteration.rows) + iteration.padding
        line = self._by_rows.get(n, self.line)
        context = live = 0
        if line.context:
            context = sum([start + (1 if idle else n + 1) for _, start, n, _, _, idle, *_ in rows])
            live = [row.idle for row in rows].count(False)
        time = self.of_work(Work(1, n, context, 0, 0))
        if self.adapter_token:
            time += self.adapter_token * sum([bool(row.inference.adapter) for row in rows])
        return time, live * line.context

    def slower(self, factor: float) -> Costs:
        """Return the costs of an engine that takes so many times as long."""
        decode = {size: line.slower(factor) for size, line in self.decode.items()}
        others = ("load", "adapter_token", "least")
        times = {name: round(factor * getattr(self, name)) for name in others}
        line, prompts = self.line.slower(factor), self.prompts and self.prompts.slower(factor)
        return replace(self, line=line, decode=decode, prompts=prompts, **times)

    def scaled(self, factor: float) -> Costs:
        """Return the costs of a server so many times as slow, with the same HTTP outside it."""
        gaps = {name: round(factor * getattr(self, name)) for name in _TIMES if "gap" in name}
        return replace(self.slower(factor), **gaps)

    @property
    def sha256(self) -> str:
        """Return a hash of all that they say, whose change a name would hide."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()

    @property
    def uncertainty(self) -> float:
        """Relative deviation of a run's time, by runs held out of the fit; 0 for stated costs."""
        held_out = self.source.get("residuals", {}).get("held_out", {})
        least, *_, most = held_out.get("of_runs_percent", (0.0, 0.0))
        return float(most - least) / 100 / (2 * 1.645)

    def between(self, iteration: Iteration, answered: int) -> int:
        """Return the time from an iteration's end to the beginning of the next one, while there is
        work. answered: number of requests that it answers.
        """
        rows = len(iteration.rows) + iteration.padding
        gap = self.gap + self.gap_row * rows
        if answered:
            gap += answered * max(0, self.gap_answer - self.gap_answer_row * rows)
        if (self.gap_stream or self.gap_stream_row) and (n := streams(iteration)):
            gap += self.gap_stream + self.gap_stream_row * n
        return gap

    def of_work(self, amounts: Work) -> int:
        """Return the time of these amounts, without adapters and launches."""
        if amounts.prefill and self.prompts:
            rows = amounts._replace(prefill=0, chunk_context=0)
            return self.of_work(rows) + self.prompts.of(amounts)
        line = self.line if amounts.prefill else self._by_rows.get(amounts.row, self.line)
        time = line.of(amounts)
        if self.least:
            time += max(0, self.least - line.of(amounts._replace(context=0, chunk_context=0)))
        return time

    @functools.cached_property
    def _by_rows(self) -> Mapping[int, Line]:
        lines = dict(self.decode)
        for (few, least), (many, most) in pairwise(sorted(self.decode.items())):
            for n in range(few + 1, many):
                terms = zip(astuple(least), astuple(most))
                lines[n] = Line(*(a + (b - a) * (n - few) // (many - few) for a, b in terms))
        return lines


@dataclass(frozen=True)
class CostFunction(Costs):
    """Costs by a function that returns the seconds of an iteration; `following` is not known."""

    cost_s: Callable[[Iteration], float] = field(kw_only=True)

    def of(self, iteration: Iteration) -> int:
        return round(self.cost_s(iteration) * PS)


_OF_FAKE = {"iteration": fake.ITERATION_S, "row": fake.ROW_S, "prefill": fake.PREFILL_TOKEN_S}
FAKE = Costs("fake", Line(**{term: round(s * PS) for term, s in _OF_FAKE.items()}))
SECOND = Costs("second", Line(iteration=PS))  # an iteration per second, as in worked examples
STATED = {costs.name: costs for costs in (FAKE, SECOND)}
_TIMES = [term.name for term in fields(Costs) if term.type == "int"]
HTTP = ("request", "answer", "request_turn", "answer_turn")  # between client and server


def save(costs: Costs, path: Path) -> None:
    """Write a file that `load` reads; costs are named by their file. Raises Unwritten."""
    from client.machine import save_json  # a browser has no psutil

    values: dict[str, Any] = {
        "unit": "picoseconds",
        "line": asdict(costs.line),
        "decode": {str(size): asdict(line) for size, line in costs.decode.items()},
        "prompts": asdict(costs.prompts) if costs.prompts else None,
        **{name: getattr(costs, name) for name in _TIMES},
    }
    save_json(path, values | dict(costs.source))


def load(name: str | Path) -> Costs:
    """Return costs of `STATED` or results/costs by their name, of any file by its path, or of a
    machine that is not here by an estimate. Raises CostsError.
    """
    if name in STATED:
        return STATED[str(name)]
    if str(name).startswith(roofline.PREFIX):
        return _estimated(str(name))
    path = Path(name) if str(name).endswith(".json") else FOLDER / f"{name}.json"
    try:
        values = read_json(path)
        values.pop("unit")
        prompts = values.pop("prompts", None)
        for left in ("noise", "beyond_few"):  # older files have them
            values.pop(left, None)
        line = _line(values.pop("line"))
        decode = {int(size): _line(of) for size, of in values.pop("decode").items()}
        times = {time: _picoseconds(values.pop(time, 0)) for time in _TIMES}
        prompts = prompts and _line(prompts)
        return Costs(path.stem, line, decode=decode, **times, prompts=prompts, source=values)
    except OSError:
        names = ", ".join([*STATED, *sorted(file.stem for file in FOLDER.glob("*.json"))])
        raise CostsError(
            f"there are no costs {str(name)!r}; name one of {names}, a file that ends in .json, or "
            f"measure this machine's with python -m simulate.measure_costs"
        ) from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CostsError(
            f"{path} holds no costs ({type(error).__name__}: {error}); measure them again with "
            f"python -m simulate.measure_costs"
        ) from None


def _estimated(name: str) -> Costs:
    """Return the costs of a machine that is not here. Plans, answers and HTTP take what they take
    beside an engine that leaves the processor alone.
    """
    try:
        values = roofline.values(name)
    except ValueError as error:
        raise CostsError(str(error)) from None
    around, line = load("fake-server"), _line(values.pop("line"))
    least, name = values.pop("least"), roofline.marked(name)
    around = replace(around, decode={}, prompts=None, least=least)
    return replace(around, name=name, line=line, source=values)


def _line(terms: Mapping[str, Any]) -> Line:
    return Line(**{term.name: _picoseconds(terms[term.name]) for term in fields(Line)})


def _picoseconds(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_S * PS:
        raise ValueError(f"{value!r} is no number of picoseconds up to {MOST_S:g} s")
    return value
