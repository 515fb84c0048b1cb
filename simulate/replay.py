"""A recording's calls made once more, at the recorded times, on a scheduler of the same settings:
the same must come of each (`recording`).

A file may hold several recordings, each of a server that was started with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from observers.recording import ASKED, ROW, VERSION, Entry, line_of, record
from scheduling.errors import Cancelled, DeadlinePassed, GenerationFailed
from scheduling.inference import Inference, Iteration, IterationRecord, Observer
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler

ENDINGS = {kind.code: kind for kind in (Cancelled, DeadlinePassed)}  # all others are failures


class ReplayError(Exception):
    """A recording that cannot be replayed; the message is a sentence that says why."""


class _NotInFlight(Exception):
    """A call names a request that the replay does not have."""


@dataclass
class Replayed:
    """What came of a replay. After a difference nothing is compared before the next recording
    begins, since the schedulers are no longer in the same state.
    """

    recordings: int = 0
    unfinished: int = 0  # of them, those that end before their servers did
    calls: int = 0
    iterations: int = 0  # calls of `schedule` that came to rows
    equal: int = 0
    first_difference: str | None = None  # where it is, and what

    def __str__(self) -> str:
        """In sentences."""
        said = f"{self.equal:,} of {self.iterations:,} iterations are equal, row by row"
        if self.recordings > 1:
            said += f", in {self.recordings} recordings"
        if self.first_difference is not None:
            said += f". The first difference is in {self.first_difference}"
        if self.unfinished:
            many = (
                f"{self.unfinished} recordings end" if self.unfinished > 1 else "A recording ends"
            )
            said += f". {many} before the server did, and was replayed up to there"
        return said + "."


Observe = Callable[[Scheduler, Any], Observer]  # of a recording's scheduler, and its settings


def replay_file(path: str, observe: Observe | None = None) -> Replayed:
    """`replay` of a file's lines. Raises ReplayError, also for a file that cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return replay(file, observe)
    except OSError as error:
        raise ReplayError(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ReplayError(f"{path} is no recording: it is not text.") from None
    except ReplayError as error:
        raise ReplayError(f"{path}, {error}") from None


def replay(lines: Iterable[str], observe: Observe | None = None) -> Replayed:
    """Make the calls of all recordings again, and compare. A line that is cut off is the end.

    observe: asked at the beginning of each recording who is told of it. Raises ReplayError, with
    the line, for a gap, a foreign version, and what is no recording.
    """
    recordings, cut = _Recordings(observe), 0
    for number, line in enumerate(lines, 1):
        if cut:
            raise ReplayError(f"line {cut}: this is no line of a recording.")
        try:
            recordings.read(number, json.loads(line))
        except json.JSONDecodeError:
            cut = number
        except ReplayError as error:
            raise ReplayError(f"line {number}: {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ReplayError(
                f"line {number}: this is no line of a recording ({type(error).__name__}: {error})."
            ) from None
    found = recordings.found
    if not found.recordings:
        raise ReplayError("line 1: there is no recording.")
    if cut:
        found.unfinished = max(1, found.unfinished)
    return found


class _Recordings:
    """What came of the lines that were read so far."""

    def __init__(self, observe: Observe | None) -> None:
        self.found = Replayed()
        self._observe = observe
        self._again: _Again | None = None  # of this recording; none after a difference
        self._n = 0  # calls of this recording

    def read(self, number: int, entry: Entry) -> None:
        """Take the next line. Raises ReplayError without its number."""
        if "recording" in entry:
            self._again, self._n = _begin(entry, self._observe), 0
            self.found.recordings += 1
            self.found.unfinished += 1
        elif "gap" in entry:
            raise ReplayError(
                f"calls are missing from here on, since {entry['gap']}, and without them it cannot "
                "be replayed."
            )
        elif "end" in entry:
            self.found.unfinished -= 1
        elif not self.found.recordings:
            raise ReplayError("a recording begins with its settings, and this line has none.")
        else:
            self._compare(number, entry)

    def _compare(self, number: int, entry: Entry) -> None:
        self._n += 1
        if entry["n"] != self._n:
            raise ReplayError(
                f"this is call {entry['n']}, and call {self._n} is missing; without it what "
                "follows cannot be replayed."
            )
        found, is_iteration = self.found, "rows" in entry
        found.calls += 1
        found.iterations += is_iteration
        if self._again is None:
            return
        difference = self._again.difference(entry)
        if difference is None:
            found.equal += is_iteration
            return
        self._again = None
        if found.first_difference is None:
            where = f"iteration {found.iterations:,}, " if is_iteration else ""
            found.first_difference = f"{where}line {number:,} ({entry['call']}): {difference}"


def _begin(entry: Entry, observe: Observe | None) -> _Again:
    if entry["recording"] != VERSION:
        raise ReplayError(
            f"the recording is of version {entry['recording']}, and this code replays version "
            f"{VERSION}; replay it with the code that made it."
        )
    try:
        return _Again(entry["settings"], observe)
    except (AttributeError, KeyError) as error:
        unknown = error.name if isinstance(error, AttributeError) else error
        raise ReplayError(
            f"of its settings this code makes no scheduler, for want of {unknown}; replay it with "
            "the code that made it."
        ) from None


class _Again:
    """A scheduler that is called as a recorded one was, and recorded too."""

    def __init__(self, settings: Entry, observe: Observe | None):
        self._written: list[Entry] = []
        values = SimpleNamespace(**{name: _tuple(value) for name, value in settings.items()})
        self._scheduler = record(values, self._written.append)
        self._observer = observe(self._scheduler, values) if observe else None
        self._in_flight: dict[int, Inference] = {}
        self._iteration, self._begun = Iteration([], 0, 0, 0), 0.0

    def difference(self, entry: Entry) -> str | None:
        """Make a recorded call, and say what comes of it now that did not then, or None."""
        self._written.clear()
        try:
            self._call(entry)
        except _NotInFlight as error:
            return f"request {error} is in flight in the recording, and not in the replay"
        except Exception:
            if not self._written:  # it was not the scheduler that raised
                raise
        for id_ in entry.get("answered", ()):
            self._in_flight.pop(id_, None)
        if not self._written:
            return "it changed something in the recording, and changes nothing in the replay"
        written = json.loads(line_of(self._written[0]))
        if "keys" in entry:  # it was told them, and finds none that are new
            written["keys"] = entry["keys"]
        return _difference(entry, written)

    def _call(self, entry: Entry) -> None:
        scheduler, now = self._scheduler, entry.get("now", 0.0)
        match entry["call"]:
            case "enqueue":
                group = _group(entry["group"])
                scheduler.enqueue(group, now)
                self._in_flight |= {inference.id: inference for inference in group}
            case "schedule":
                self._iteration, _ = scheduler.schedule(now)
                self._begun = now
            case "apply":
                for id_ in entry.get("stopped", ()):
                    self._inference(id_).stop = lambda token: True
                for id_, keys in entry.get("keys", {}).items():
                    named = self._inference(int(id_))
                    named.keys = [*(named.keys or ()), *map(bytes.fromhex, keys)]
                samples = sum(row.samples for row in self._iteration.rows)
                answered = scheduler.apply(self._iteration, [0] * samples, now)
                if self._observer is not None:
                    took = now - self._begun
                    self._observer.iteration(IterationRecord(self._begun, took, self._iteration))
                self._tell(answered)
            case "fail":
                error = ENDINGS.get(entry["why"], GenerationFailed)("It was recorded.")
                error.code = entry["why"]
                self._tell(
                    scheduler.fail([self._inference(id_) for id_ in entry["ids"]], error, now)
                )
            case "expire":
                self._tell(scheduler.expire(now))
            case "limit_blocks":
                self._tell(scheduler.limit_blocks(entry["n_blocks"], now))
            case "forget_prefixes":
                scheduler.forget_prefixes()
            case other:
                raise ValueError(f"no call is named {other}")

    def _tell(self, answered: Iterable[Inference]) -> None:
        if self._observer is not None:
            for inference in answered:
                self._observer.answered(inference)

    def _inference(self, id_: int) -> Inference:
        if id_ not in self._in_flight:
            raise _NotInFlight(id_)
        return self._in_flight[id_]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _group(asked: Iterable[Entry]) -> list[Inference]:
    """A request as it came, with prompts of the same lengths."""
    group: list[Inference] = []
    for said in asked:
        leader = group[said["leader"]] if "leader" in said else None
        ids = leader.prompt_ids if leader else [0] * said["prompt_tokens"]
        keys = leader.keys if leader else [bytes.fromhex(key) for key in said.get("keys", ())]
        group.append(
            Inference(
                ids,
                said["num_tokens"],
                Sampling(seed=said["seed"]),
                keys=[*keys] if keys else None,
                leader=leader,
                **{name: said[name] for name in ASKED if name in said},
            )
        )
    return group


def _difference(recorded: Entry, replayed: Entry) -> str | None:
    """In what two entries differ: in rows, if in those at all."""
    rows = [entry.get("rows", []) for entry in (recorded, replayed)]
    if rows[0] != rows[1]:
        return _row_difference(*rows)
    for name in {**recorded, **replayed}:
        then, now = recorded.get(name), replayed.get(name)
        if then != now:
            return f"{name} {_differ(then, now)}"
    return None


def _row_difference(recorded: list[list[Any]], replayed: list[list[Any]]) -> str:
    for i, (then, now) in enumerate(zip_longest(recorded, replayed)):
        if then is None or now is None:
            return f"rows: {len(recorded)} in the recording, {len(replayed)} in the replay"
        for name, one, other in zip(ROW, _whole(then), _whole(now)):
            if one != other:
                return f"row {i} of request {then[0]}: {name} {_differ(one, other)}"
    raise AssertionError("they are equal")


def _whole(row: list[Any]) -> list[Any]:
    return [*row, *list(ROW.values())[len(row) :]]


def _differ(then: Any, now: Any) -> str:
    def said(value: Any) -> str:
        return "nothing" if value is None else json.dumps(value)

    return f"is {said(then)} in the recording, and {said(now)} in the replay"
