"""Recordings of vLLM, or of another engine that writes the same lines (docs/your_vllm.md): what was
served when, and each iteration.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TextIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from client.runs import RunError
from config import reading
from config.settings import Count
from scheduling.inference import Inference, Iteration, Row, State

FORMATS = (1, 2)
LEAST_S = 1e-6  # an iteration's least time: clocks are set
HASH = 8  # characters of a block's hash
GAVE_UP = ("abort", "error")  # endings without an answer
MAKE = "record it with simulate/vllm/vllm_recorder.py, as docs/your_vllm.md says"
Whole = Annotated[int, Field(ge=0, lt=2**53)]
Limit = Annotated[float | None, Field(gt=0, allow_inf_nan=False)]
Instant = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]  # seconds since the epoch


def _of_format_1(head: Any) -> Any:
    """Name the engine as format 2 does."""
    return {"engine": f"vLLM {head['vllm']}", **head} if "vllm" in head else head


class Asked(NamedTuple):
    """A request as it came. hashes: of its prompt's full blocks, as one text."""

    number: Whole
    arrived_at: Instant
    prompt_tokens: Count
    max_tokens: Count
    priority: int = 0
    hashes: str = ""
    queued_at: Instant | None = None  # when the scheduler got it
    # what an order of ours knew of it (vllm_order.py)
    expected: Count | None = None  # completion tokens
    user: str | None = None
    level: Whole = 0
    ttft_ms: Limit = None
    tpot_ms: Limit = None


def _asked(value: Any) -> Any:
    """Return a request; one of format 1 has vLLM's id in the second place."""
    if isinstance(value, list) and len(value) == 5 and isinstance(value[1], str):
        return [value[0], *value[2:]]
    return value


class Head(BaseModel):
    """The first line: what was served, on what, and the settings of its scheduler by vLLM's names.
    order: one of ours and its settings, if any; order_sha256: of its file, the first digits.
    num_blocks: KV blocks that requests can have. graph_sizes: batch sizes with a CUDA graph each.
    unknown: features in use that the other lines do not describe.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal[FORMATS]  # type: ignore[valid-type]
    engine: str
    model: str
    dtype: str = ""
    hardware: str = ""
    versions: dict[str, str] = {}
    policy: Literal["fcfs", "priority"] = "fcfs"
    order: str = ""
    order_sha256: str = ""
    max_num_seqs: Count
    max_num_active_seqs: Count | None = None
    max_num_batched_tokens: Count
    max_model_len: Count | None = None
    num_blocks: Count
    block_size: Count
    prefix_caching: bool = False
    watermark: float = 0.0
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    prefill_schedule_interval: int = 1
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    graph_sizes: tuple[Count, ...] = ()
    unknown: tuple[str, ...] = ()
    in_flight: list[Asked] = []


class RecordedIteration(BaseModel):
    """An iteration; see docs/your_vllm.md."""

    model_config = ConfigDict(frozen=True)

    at: Instant
    until: Instant
    new: list[Annotated[Asked, BeforeValidator(_asked)]] = []
    rows: list[tuple[Whole, Whole, Count, Whole]]
    preempted: list[Whole] = []
    aborted: list[Whole] = []
    waiting: int = -1
    queue: list[Whole] = []
    blocks_used: int = -1
    finished: dict[Whole, str] = {}
    hashes: dict[Whole, str] = {}


class Ran(NamedTuple):
    """An iteration with its rows. begin: when the engine began it: it may have been planned before
    the last one was over. answered: number of requests that it answers.
    """

    step: RecordedIteration
    begin: float
    iteration: Iteration
    answered: int


@dataclass
class Recording:
    """A file's settings and requests. `run` reads its iterations, and fills in what became of the
    requests: times of tokens, state, and hashes of all their blocks.
    """

    path: Path
    head: Head
    asked: dict[int, Asked] = field(default_factory=dict)
    requests: dict[int, Inference] = field(default_factory=dict)  # with stamps since the epoch
    hashes: dict[int, str] = field(default_factory=dict)
    running: dict[int, Inference] = field(default_factory=dict)
    iterations: int = 0
    preemptions: int | None = None  # where lines say so
    cached_tokens: int = 0  # tokens of prompts, found when their requests were admitted
    most_rows: int = 0  # rows of the largest iteration
    busy_s: float = 0.0  # total duration of the iterations
    row_s: float = 0.0  # total of each iteration's duration × its rows
    is_cut: bool = False  # its last line is not whole

    def steps(self) -> Iterator[RecordedIteration]:
        """Read the iterations. Raises RunError, with the line."""
        wrong = None
        with opened(self.path) as file:
            next(file)
            for number, line in enumerate(file, 2):
                if wrong:
                    raise RunError(wrong)
                try:
                    yield RecordedIteration.model_validate_json(line)
                except ValidationError as error:
                    what = _wrong(error)
                    wrong = f"{self.path}: line {number} is no iteration ({what}); remove it"
                    if line.endswith("\n"):
                        raise RunError(wrong) from None
                    self.is_cut = True

    def run(self) -> Iterator[Ran]:
        """Yield the iterations; the tokens of each are counted after it. Raises RunError."""
        until = float("-inf")
        in_flight = {asked.number for asked in self.head.in_flight}
        for asked in self.head.in_flight:
            self._add(asked)
        for step in self.steps():
            # the next iteration may have been planned before the last one was over
            if step.until < max(step.at, until):
                raise RunError(
                    f"{self.path}: an iteration ends at {step.until}, before it or the last one: "
                    f"the clock was set; {MAKE}"
                )
            begin, until = max(step.at, until), step.until
            for asked in step.new:
                self._add(asked)
            try:
                for number in [*step.preempted, *step.aborted]:
                    self.running.pop(number, None)
                for number in step.aborted:
                    self._end(number, begin, State.CANCELLED)
                rows = [self._row(self.requests[number], *values) for number, *values in step.rows]
                for number in (*step.finished, *step.queue):
                    self.requests[number]
            except KeyError as error:
                raise RunError(
                    f"{self.path}: request {error} is in no earlier line; a recording must have "
                    f"all lines from its first one on, so {MAKE}"
                ) from None
            if "preempted" in step.model_fields_set:
                self.preemptions = (self.preemptions or 0) + len(step.preempted)
            for row in rows:
                if not row.idle:
                    self.running[row.inference.id] = row.inference
                if row.inference.admitted_at is None:
                    row.inference.admitted_at = begin
                    if row.inference.id not in in_flight:
                        self.cached_tokens += row.start
            self.most_rows = max(self.most_rows, len(rows))
            took = max(until - begin, LEAST_S)
            self.busy_s += took
            self.row_s += took * len(rows)
            self.iterations += 1
            iteration = Iteration(rows, len(self.running), step.waiting, step.blocks_used)
            yield Ran(step, begin, iteration, len(step.finished))
            for row in rows:
                row.inference.token_times += [until] * row.samples
            for number, reason in step.finished.items():
                self._end(number, until, State.FAILED if reason in GAVE_UP else State.FINISHED)
                self.running.pop(number, None)
            for number, more in step.hashes.items():
                self.hashes[number] = self.hashes.get(number, "") + more

    def _add(self, asked: Asked) -> None:
        if asked.number in self.requests:
            raise RunError(
                f"{self.path}: two requests have the number {asked.number}, as in recordings of "
                "two processes; give each recording a file of its own"
            )
        self.asked[asked.number] = asked
        self.hashes[asked.number] = asked.hashes
        self.requests[asked.number] = Inference(
            range(asked.prompt_tokens),  # type: ignore[arg-type]  # its length alone is known
            asked.max_tokens,
            id=asked.number,
            arrived_at=asked.arrived_at,
            priority=asked.priority,
        )

    def _end(self, number: int, at: float, state: State) -> None:
        inference = self.requests[number]
        inference.answered_at, inference.state = at, state
        if inference.admitted_at is None:
            inference.admitted_at = at

    def _row(self, inference: Inference, start: int, n: int, made: int) -> Row:
        """Return a row. vLLM may compute one after a request's last token: it is idle."""
        if made > 1:
            raise RunError(
                f"{self.path}: request {inference.id} gets {made} tokens at once, and speculative "
                "decoding is not read; record without it"
            )
        recomputed = max(0, min(start + n, inference.computed) - start)
        inference.computed = max(inference.computed, start + n)
        inference.tokens += [0] * made
        return Row(inference, start, n, [], made > 0, inference.answered_at is not None, recomputed)


def _wrong(error: ValueError) -> str:
    """Return the first fault that pydantic found, with its place; others in their own words."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return ": ".join(filter(None, (where, first["msg"])))


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does: with settings that name their format."""
    if not path.is_file():
        return False
    with opened(path) as file, contextlib.suppress(ValueError):
        head = reading.parse(file.readline())
        return isinstance(head, dict) and not {"format", "vllm"}.isdisjoint(head)
    return False


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a recording, which gzip may have packed. Raises RunError for a damaged one."""
    try:
        with reading.opened(path) as file, io.TextIOWrapper(file, "utf-8", "replace") as text:
            yield text
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None


def read(path: Path) -> Recording:
    """Return a recording whose iterations are not read yet. Raises RunError."""
    if not path.is_file():
        raise RunError(f"{path} is no file; {MAKE}")
    if not is_recording(path):
        raise RunError(f"{path} is no recording of vLLM, whose log in text is none; {MAKE}")
    with opened(path) as file:
        first, second = file.readline(), file.readline()
    try:
        head = Head.model_validate(_of_format_1(reading.parse(first)))
    except ValueError as error:  # pydantic's ValidationError is one
        raise RunError(
            f"{path}: its first line has another form ({_wrong(error)}), and this code reads "
            f"formats 1 and 2; {MAKE}"
        ) from None
    if head.unknown:
        raise RunError(
            f"{path} was recorded with {', '.join(head.unknown)}, which is not simulated; record "
            "vLLM without"
        )
    if not second:
        raise RunError(f"{path} has no iterations yet; send vLLM some requests first")
    return Recording(path, head)
