"""Replay of a server's recording: its calls are made once more, at the recorded times, on a
scheduler of the same settings, and must have the same results (`server.observers.recording`).

A file may hold several recordings, each of a server that was started with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from config.config import Config
from config.flags import refuse_unknown_settings
from config.reading import parse
from config.settings import ConfigError
from scheduling import user_policies
from scheduling.building import build_group
from scheduling.errors import Cancelled, DeadlinePassed, GenerationFailed
from scheduling.inference import Inference, Iteration, Slo
from scheduling.records import IterationRecord, Observer
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from server.observers.recording import OPTIONAL, ROW, SLO, VERSION, Entry, line_of, record

WRONG = 1  # a draft token in the place of one that was not recorded; texts are zeros
ENDINGS = {kind.code: kind for kind in (Cancelled, DeadlinePassed)}  # all others are failures
Observe = Callable[[Scheduler, Any], Observer]  # takes a recording's scheduler and settings


class ReplayError(Exception):
    """A recording that cannot be replayed; the message is a sentence that says why."""


class _NotInFlight(Exception):
    """A call for a request that the replay does not have."""


@dataclass
class Replayed:
    """Result of a replay. After a difference nothing is compared before the next recording begins,
    since the schedulers are no longer in the same state.
    """

    recordings: int = 0
    unfinished: int = 0  # recordings that end before their servers did
    calls: int = 0
    iterations: int = 0  # number of `schedule` calls that returned rows
    equal: int = 0  # number of iterations equal to the recorded ones
    first_difference: str | None = None  # its place, and what it is

    def add_difference(self, line: int, entry: Entry, difference: str) -> None:
        """Keep the first difference, with its place."""
        if self.first_difference is None:
            where = f"iteration {self.iterations:,}, " if "rows" in entry else ""
            self.first_difference = f"{where}line {line:,} ({entry['call']}): {difference}"

    def __str__(self) -> str:
        """Describe it in sentences."""
        text = f"{self.equal:,} of {self.iterations:,} iterations are equal, row by row"
        if self.recordings > 1:
            text += f", in {self.recordings} recordings"
        if self.first_difference is not None:
            text += f". The first difference is in {self.first_difference}"
        if self.unfinished:
            n = self.unfinished
            many = f"{n} recordings end" if n > 1 else "A recording ends"
            text += f". {many} before the server did, and was replayed up to there"
        return text + "."


def replay_file(path: str, observe: Observe | None = None) -> Replayed:
    """`replay` a file's lines. Raises ReplayError, also for a file that cannot be read."""
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

    observe: makes an observer at the beginning of each recording. Raises ReplayError, with the
    line, for a gap, a foreign version, and what is no recording.
    """
    result, cut = Replayed(), 0
    server: _Server | None = None  # this recording's; none after a difference
    calls = 0  # calls in this recording
    for number, line in enumerate(lines, 1):
        if cut:
            raise ReplayError(f"line {cut}: this is no line of a recording.")
        try:
            entry = parse(line)
        except ValueError:
            cut = number
            continue
        try:
            if "recording" in entry:
                server, calls = _begin(entry, observe), 0
                result.recordings += 1
                result.unfinished += 1
            elif "end" in entry:
                result.unfinished -= 1
            else:
                calls += 1
                _check(entry, calls, result)
                if server and (difference := server.difference(entry)) is not None:
                    server = None
                    result.add_difference(number, entry, difference)
                result.equal += server is not None and "rows" in entry
        except ReplayError as error:
            raise ReplayError(f"line {number}: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ReplayError(
                f"line {number}: this is no line of a recording ({type(error).__name__}: {error})."
            ) from None
    if not result.recordings:
        raise ReplayError("line 1: there is no recording.")
    if cut:
        result.unfinished = max(1, result.unfinished)
    return result


def _check(entry: Entry, n: int, result: Replayed) -> None:
    """Count an entry that must be the n-th call of its recording. Raises ReplayError."""
    if "gap" in entry:
        raise ReplayError(
            f"calls are missing from here on, since {entry['gap']}, and without them it cannot be "
            "replayed."
        )
    if not result.recordings:
        raise ReplayError("a recording begins with its settings, and this line has none.")
    if entry["n"] != n:
        raise ReplayError(
            f"this is call {entry['n']}, and call {n} is missing; without it what follows cannot "
            "be replayed."
        )
    result.calls += 1
    result.iterations += "rows" in entry


def _begin(entry: Entry, observe: Observe | None) -> _Server:
    if entry["recording"] != VERSION:
        raise ReplayError(
            f"the recording is of version {entry['recording']}, and this code replays version "
            f"{VERSION}; replay it with the code that made it."
        )
    try:
        settings = entry["settings"]
        if absent := user_policies.absent([settings]):
            raise ReplayError(f"{absent}.")
        refuse_unknown_settings("the recording", settings)
        return _Server(settings, observe)
    except ConfigError as error:
        raise ReplayError(f"{error}.") from None
    except (AttributeError, KeyError) as error:
        unknown = error.name if isinstance(error, AttributeError) else error
        raise ReplayError(
            f"this code makes no scheduler of its settings: {unknown} is unknown or missing; "
            "replay it with the code that made it."
        ) from None


class _Server:
    """A scheduler that is called as a recorded one was, and recorded too."""

    def __init__(self, settings: Entry, observe: Observe | None):
        self._written: list[Entry] = []
        # settings that did not exist yet are at their defaults, as if they did not
        whole = {k: f.default for k, f in Config.model_fields.items()}
        whole |= {"lora_slots": 0} | settings
        values = SimpleNamespace(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in whole.items()}
        )
        self._scheduler = record(values, self._written.append)
        self._observer = observe(self._scheduler, values) if observe else None
        self._in_flight: dict[int, Inference] = {}
        self._iteration, self._begun = Iteration([], 0, 0, 0), 0.0

    def difference(self, entry: Entry) -> str | None:
        """Make a recorded call; return how its result differs from the recorded one."""
        self._written.clear()
        try:
            for inference in self._call(entry):
                if self._observer is not None:
                    self._observer.answered(inference)
        except _NotInFlight as error:
            return f"request {error} is in flight in the recording, and not in the replay"
        except user_policies.FAULTS:
            if not self._written:  # it was not the scheduler that raised
                raise
        for id_ in entry.get("answered", ()):
            self._in_flight.pop(id_, None)
        if not self._written:
            return "it changed something in the recording, and changes nothing in the replay"
        written = json.loads(line_of(self._written[0]))
        for name in {"keys", "drafts"} & entry.keys():  # the replay has them from the recording
            written[name] = entry[name]
        return _difference({**entry}, written)

    def _call(self, entry: Entry) -> Iterable[Inference]:
        """Make a recorded call; return the inferences that it answers."""
        scheduler, now = self._scheduler, entry.get("now", 0.0)
        match entry["call"]:
            case "enqueue":
                group = _group(entry["group"])
                scheduler.enqueue(group, now)
                self._in_flight |= {inference.id: inference for inference in group}
            case "schedule":
                drafts = entry.get("drafts", {})
                for id_, inference in self._in_flight.items():
                    n = drafts.get(str(id_), 0)  # in earlier recordings a pair
                    inference.drafts.ids = [WRONG] * (n[0] if isinstance(n, list) else n)
                self._iteration, _ = scheduler.schedule(now)
                self._begun = now
            case "apply":
                return self._apply(entry, now)
            case "fail":
                error = ENDINGS.get(entry["why"], GenerationFailed)("It was recorded.")
                error.code = entry["why"]
                return scheduler.fail([self._inference(id_) for id_ in entry["ids"]], error, now)
            case "expire":
                return scheduler.expire(now)
            case "limit_blocks":
                return scheduler.limit_blocks(entry["n_blocks"], now)
            case "forget_prefixes":
                scheduler.forget_prefixes()
            case "forget_adapter":
                scheduler.forget_adapter(entry["name"])
            case other:
                raise ValueError(f"no call is named {other}")
        return ()

    def _apply(self, entry: Entry, now: float) -> Iterable[Inference]:
        iteration, begun = self._iteration, self._begun
        tokens = {int(id_): n for id_, n in entry.get("tokens", {}).items()}
        for id_ in entry.get("stopped", ()):
            last = len((inference := self._inference(id_)).tokens) + tokens.get(id_, 1)
            inference.stop = lambda _, i=inference, last=last: len(i.tokens) == last
        for id_, keys in entry.get("keys", {}).items():
            if (prefix := self._inference(int(id_)).prefix) is not None:
                prefix.keys += map(bytes.fromhex, keys)
        ids: list[int] = []  # the drafts themselves, as far as they were accepted
        for row in iteration.rows:
            n = tokens.get(row.inference.id, 1) - 1
            ids += [*row.drafts[:n], *[0] * (len(row.drafts[n:]) + row.samples)]
        answered = self._scheduler.apply(iteration, ids, now)
        if self._observer is not None:
            self._observer.iteration(IterationRecord(begun, now - begun, iteration))
        return answered

    def _inference(self, id_: int) -> Inference:
        if id_ not in self._in_flight:
            raise _NotInFlight(id_)
        return self._in_flight[id_]


def _group(entries: Sequence[Entry]) -> list[Inference]:
    """Return a recorded request, with prompts of the same lengths. Raises ReplayError."""
    first, leaders = entries[0], [entry for entry in entries if "leader" not in entry]
    if not leaders or len(entries) % len(leaders):
        raise ReplayError(
            f"a request has {len(entries)} completions of {len(leaders)} prompts, and each prompt "
            "has as many as the others; replay the file as the server wrote it."
        )
    return build_group(
        None,
        [[0] * entry["prompt_tokens"] for entry in leaders],
        first["num_tokens"],
        [Sampling(seed=entry["seed"]) for entry in entries],
        keys=[[*map(bytes.fromhex, entry.get("keys", ()))] for entry in leaders],
        slo=Slo(**{field: first.get(name) for name, field in SLO.items()}),
        **{name: first[name] for name in OPTIONAL if name in first},
    )


def _difference(recorded: Entry, replayed: Entry) -> str | None:
    """Return the first difference of two entries, in rows before all else."""
    rows, rows_again = (entry.pop("rows", []) for entry in (recorded, replayed))
    for i, (row, again) in enumerate(zip(rows, rows_again)):
        then, now = ({**ROW, **dict(zip(ROW, values))} for values in (row, again))
        if difference := _differing(then, now):
            return f"row {i} of request {row[0]}: {difference}"
    if len(rows) != len(rows_again):
        return f"rows: {len(rows)} in the recording, {len(rows_again)} in the replay"
    return _differing(recorded, replayed)


def _differing(recorded: Entry, replayed: Entry) -> str | None:
    """Return the first name whose values differ, with both."""
    for name in {**recorded, **replayed}:
        values = [entry.get(name) for entry in (recorded, replayed)]
        if values[0] != values[1]:
            then, now = ("nothing" if value is None else json.dumps(value) for value in values)
            return f"{name} is {then} in the recording, and {now} in the replay"
    return None
