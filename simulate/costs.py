"""Costs of an iteration: the products of its tokens, its rows with what they attend, its chunks of
prompts; and the time that is lost around it.

Times are whole picoseconds: sums are exact, so that iterations take as long together as one by one.
The form is Vidur's (Agrawal et al., MLSys 2024, section 4) with three operators. `simulate.kernels`
makes the costs of GPUs that are not here. `python -m simulate.measure_costs` fits those of rows and
prompts to the machine at hand, with their products in them. Knows neither torch nor numpy.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from config.reading import read_json
from generate import fake
from scheduling.inference import Iteration
from simulate import roofline
from simulate.loop import PS
from simulate.served_model import KERNELS

MOST_S = 10**9  # beyond it, a simulation never ends
FOLDER = Path(__file__).resolve().parents[1] / "results" / "costs"


class CostsError(Exception):
    """Costs that cannot be used; the message is one sentence that names the fix."""


class Work(NamedTuple):
    """Amounts that an iteration computes."""

    rows: int  # of all kinds, padding too; a draft token counts as a row
    tokens: int  # of all rows
    context: int  # positions that decode rows, their draft tokens and idle rows attend
    prefill: int  # tokens of chunks of prompts
    chunk_context: int  # positions that these attend: n tokens from s on, n·s + n(n + 1)/2


def work(iteration: Iteration) -> Work:
    """Count what an iteration computes."""
    context = prefill = chunks = chunk_context = n_drafts = 0
    for inference, start, n, _, samples, idle, _, drafts in iteration.rows:
        if idle or (samples and n == 1 and start >= len(inference.prompt_ids)):  # `row.decodes`
            context += start + 1
            continue
        attended = n * start + n * (n + 1) // 2
        if drafts:
            n_drafts += n - 1
            context += attended
        else:
            chunks += 1
            prefill += n
            chunk_context += attended
    rows = len(iteration.rows) + iteration.padding + n_drafts
    return Work(rows, rows - chunks + prefill, context, prefill, chunk_context)


def streams(iteration: Iteration) -> int:
    """Count the rows whose token is sent at once."""
    return sum(row.inference.streamed and row.samples and not row.idle for row in iteration.rows)


@dataclass(frozen=True, slots=True)
class Line:
    """Picoseconds of an iteration and of each unit of its `Work`, none below 0."""

    iteration: int = 0
    context: int = 0
    prefill: int = 0
    chunk_context: int = 0

    def of(self, work: Work) -> int:
        attended = self.context * work.context + self.chunk_context * work.chunk_context
        return self.iteration + self.prefill * work.prefill + attended

    def slower(self, factor: float) -> Line:
        return Line(*(round(factor * value) for value in astuple(self)))


class Table(dict[int, Line]):
    """The line of each number. Between two given numbers lies their interpolation, and outside them
    the straight line through the nearest two; one given number holds for all.
    """

    def __init__(self, given: Mapping[int, Line]):
        super().__init__(given)
        self._numbers = sorted(given)

    def __missing__(self, n: int) -> Line:
        numbers = self._numbers
        k = min(max(1, bisect_left(numbers, n)), len(numbers) - 1)
        few, many = numbers[k - 1], numbers[k]
        if few == many:
            return self[few]
        terms = zip(astuple(self[few]), astuple(self[many]))
        line = Line(*(max(0, a + (b - a) * (n - few) // (many - few)) for a, b in terms))
        self[n] = line
        return line


@dataclass(frozen=True)
class Costs:
    """Costs of serving on one machine with one engine, in picoseconds.

    decode: the line of an iteration's rows, by their number: their attention, and all else that is
    not in `products`. Lines of several numbers do not lie on one line: a CPU's kernels work in
    tiles, a GPU has a graph for each decoder batch size. prompts: the time that chunks of prompts
    add to that of their iteration's rows, all taken as decode rows. products: times of the products
    of weights and tokens, by the number of tokens; empty where decode and prompts hold them.
    source: hardware, commit, date, the engine's config and residuals, of costs that were fitted;
    `estimate` of those that were not, in words.
    """

    name: str
    decode: Mapping[int, Line]
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
    source: Mapping[str, Any] = field(default_factory=dict)
    load: int = 0  # for each adapter that is loaded before an iteration
    adapter_token: int = 0  # for each token of a row with an adapter
    prompts: Line = Line()
    products: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def straight(
        cls,
        name: str,
        iteration: int,
        row: int = 0,
        context: int = 0,
        prefill: int = 0,
        chunk_context: int = 0,
        **others: Any,
    ) -> Costs:
        """Return costs that rise with each unit of `Work` by the same time."""
        decode = {n: Line(iteration + n * row, context) for n in (0, 1)}
        prompts = Line(0, 0, prefill, chunk_context)
        return cls(name, decode, prompts=prompts, **others)

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
        line = self._lines[n]
        context = live = 0
        if line.context:
            context = sum([start + (1 if idle else n + 1) for _, start, n, _, _, idle, *_ in rows])
            live = [row.idle for row in rows].count(False)
        time = self.of_work(Work(n, n, context, 0, 0))
        if self.adapter_token:
            time += self.adapter_token * sum([bool(row.inference.adapter) for row in rows])
        return time, live * line.context

    def slower(self, factor: float) -> Costs:
        """Return the costs of an engine that takes so many times as long."""
        decode = {rows: line.slower(factor) for rows, line in self.decode.items()}
        products = {tokens: round(factor * time) for tokens, time in self.products.items()}
        times = {name: round(factor * getattr(self, name)) for name in ("load", "adapter_token")}
        prompts = self.prompts.slower(factor)
        return replace(self, decode=decode, products=products, prompts=prompts, **times)

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
        time = self._lines[amounts.rows].of(amounts)
        if amounts.prefill:
            time += self.prompts.of(amounts)
        if self.products:
            time += self._products[amounts.tokens].iteration
        return time

    @functools.cached_property
    def _lines(self) -> Table:
        return Table(self.decode)

    @functools.cached_property
    def _products(self) -> Table:
        return Table({tokens: Line(time) for tokens, time in self.products.items()})


@dataclass(frozen=True)
class CostFunction(Costs):
    """Costs by a function that returns the seconds of an iteration; `following` is not known."""

    cost_s: Callable[[Iteration], float] = field(kw_only=True)

    def of(self, iteration: Iteration) -> int:
        return round(self.cost_s(iteration) * PS)


_OF_FAKE = {"iteration": fake.ITERATION_S, "row": fake.ROW_S, "prefill": fake.PREFILL_TOKEN_S}
FAKE = Costs.straight("fake", **{term: round(s * PS) for term, s in _OF_FAKE.items()})
SECOND = Costs.straight("second", PS)  # an iteration per second, as in worked examples
STATED = {costs.name: costs for costs in (FAKE, SECOND)}
_TIMES = [term.name for term in fields(Costs) if term.type == "int"]
HTTP = ("request", "answer", "request_turn", "answer_turn")  # between client and server


def save(costs: Costs, path: Path) -> None:
    """Write a file that `load` reads; costs are named by their file. Raises Unwritten."""
    from client.machine import save_json  # a browser has no psutil

    values: dict[str, Any] = {
        "unit": "picoseconds",
        "products": {str(tokens): time for tokens, time in costs.products.items()},
        "decode": {str(rows): _terms(line) for rows, line in costs.decode.items()},
        "prompts": _terms(costs.prompts),
        **{name: time for name in _TIMES if (time := getattr(costs, name))},
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
    if str(name).startswith(KERNELS):
        from simulate import kernels  # it loads numpy

        try:
            return _read(str(name), kernels.values(str(name)))
        except ValueError as error:
            raise CostsError(str(error)) from None
    path = Path(name) if str(name).endswith(".json") else FOLDER / f"{name}.json"
    try:
        values = read_json(path)
        return _read(path.stem, values)
    except OSError:
        names = [*STATED, *sorted(file.stem for file in FOLDER.glob("*.json"))]
        near = ", ".join(difflib.get_close_matches(str(name), names, 5, 0.4) or names[:5])
        raise CostsError(
            f"there are no costs {str(name)!r}; name one of results/costs, such as {near}, a file "
            f"that ends in .json, or measure this machine's with python -m simulate.measure_costs"
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
    around = {time: getattr(load("fake-server"), time) for time in _TIMES}
    return _read(roofline.marked(name), values | around)


def _read(name: str, values: dict[str, Any]) -> Costs:
    """Return costs by what their file says. Raises what a file that is none makes it raise."""
    values.pop("unit", None)
    products = {int(n): _picoseconds(time) for n, time in values.pop("products").items()}
    decode = {int(rows): _line(terms) for rows, terms in values.pop("decode").items()}
    prompts = _line(values.pop("prompts"))
    times = {time: _picoseconds(values.pop(time, 0)) for time in _TIMES}
    return Costs(name, decode, prompts=prompts, products=products, **times, source=values)


def _terms(line: Line) -> dict[str, int]:
    return {term: value for term, value in asdict(line).items() if value}


def _line(terms: Mapping[str, Any]) -> Line:
    return Line(**{term: _picoseconds(value) for term, value in terms.items()})


def _picoseconds(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_S * PS:
        raise ValueError(f"{value!r} is no number of picoseconds up to {MOST_S:g} s")
    return value
