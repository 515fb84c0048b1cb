"""Traces: the requests of a workload as columns, and as JSON lines of our form.

`at` is seconds from the start. With `users` the loop is closed: a request is sent as soon as fewer
than `users` are in flight. With `after` it is a later turn of a conversation. `model`, `user`,
`priority`, `slo_class` and limits go to the server. Every mode replays the same trace. Files of
other forms are read by `client/formats.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client.draws import Arrivals, WorkloadError, arrivals
from client.saving import written
from client.users import missing
from config.reading import read_lines
from config.settings import Count, NotNegative

ANONYMOUS = ""  # the user of requests that name none; no user has an empty name
MOST_SAVED = 100_000  # requests of a trace that is saved
LIMITED = ("ttft", "tpot")  # measures on which a request may have a limit of its own
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # in ms
Wide = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # as wide as columns and the server's fields
Limits = Mapping[str, float | np.ndarray]  # in ms, by measure: one of all answers, or each answer's


class Request(BaseModel):
    """One line of a trace. Fields that are not the client's own go to the server as they are.

    `prompt` of a later turn is its own words alone, and goes on from the answers as they came;
    `prompt_ids` are its whole prompt. `at` of a later turn is when its conversation begins.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Wide = Field(description="number of the request")
    at: NotNegative = Field(description="when it is sent, s from the start")
    users: Count | None = Field(default=None, description="most in flight, in a closed loop")
    prompt: str | None = Field(default=None, description="text; of a turn, its own words alone")
    prompt_ids: list[Wide] | None = Field(default=None, description="or ids; of a turn, all of it")
    num_tokens: Count = Field(description="completion tokens")
    temperature: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="0: greedy, the likeliest token"
    )
    top_k: Wide | None = Field(default=None, description="sampling")
    top_p: float | None = Field(default=None, description="sampling")
    seed: Wide | None = Field(default=None, description="sampling")
    model: str | None = Field(default=None, min_length=1, description="LoRA adapter, if any")
    user: str | None = Field(default=None, min_length=1, description="of fairness and limits")
    priority: Wide | None = Field(default=None, ge=0, description="level, 1 the highest")
    slo_class: str | None = Field(default=None, min_length=1, description="class of --slo-classes")
    slo_ttft_ms: Limit | None = Field(default=None, description="longest time to the first token")
    slo_tpot_ms: Limit | None = Field(default=None, description="longest time per output token")
    after: Wide | None = Field(default=None, description="id of the conversation's turn before it")
    think_s: NotNegative | None = Field(default=None, description="time from its answer to this")

    def body(self) -> dict[str, Any]:
        """Return the JSON body of POST /inference."""
        own = {"id", "at", "users", "after", "think_s"}
        return self.model_dump(exclude=own, exclude_none=True)

    @property
    def ids(self) -> list[int]:
        """Ids of the prompt: a text's by `--tokenizer bytes`, a later turn's of its own words."""
        return self.prompt_ids or list((self.prompt or "").encode())


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Sequence[Request]):
    """Requests as columns; `make` makes the request of a number."""

    make: Callable[[int], Request]
    id: np.ndarray
    at: np.ndarray  # seconds
    num_tokens: np.ndarray
    user: np.ndarray  # number of its user in `names`
    names: Sequence[str]  # users' names, by their first requests
    priority: np.ndarray  # 0: it names none
    slo_class: np.ndarray  # number of its class in `classes`
    classes: Sequence[str]  # names of classes with limits
    slo_ms: Mapping[str, np.ndarray]  # its own limits by measure, in LIMITED; infinity: none
    after: np.ndarray  # number of the turn before it; -1: it waits for none
    think_s: np.ndarray  # NaN: it waits for none
    users: int | None  # users of a closed loop

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Trace:
        if isinstance(requests, Trace):
            return requests
        numbers = {request.id: i for i, request in enumerate(requests)}
        users = [request.user or ANONYMOUS for request in requests]
        names = {name: i for i, name in enumerate(dict.fromkeys(users))}
        of_class = [request.slo_class or ANONYMOUS for request in requests]
        classes = {name: i for i, name in enumerate(dict.fromkeys(of_class))}
        return cls(
            requests.__getitem__,
            np.array([request.id for request in requests]),
            np.array([request.at for request in requests], float),
            np.array([request.num_tokens for request in requests]),
            np.array([names[name] for name in users]),
            list(names),
            np.array([request.priority or 0 for request in requests]),
            np.array([classes[name] for name in of_class]),
            list(classes),
            {
                name: np.array([getattr(r, f"slo_{name}_ms") or math.inf for r in requests])
                for name in LIMITED
            },
            np.array([-1 if r.after is None else numbers[r.after] for r in requests]),
            np.array([math.nan if r.think_s is None else r.think_s for r in requests], float),
            requests[0].users,
        )

    def limits_ms(self, numbers: np.ndarray, all_ms: Mapping[str, float]) -> Limits:
        """Return the limits of these requests by measure: their own, and those of all."""
        own = {name: limits[numbers] for name, limits in self.slo_ms.items()}
        own = {name: limits for name, limits in own.items() if np.isfinite(self.slo_ms[name]).any()}
        return own | {
            name: np.minimum(own.get(name, math.inf), limit) for name, limit in all_ms.items()
        }

    @property
    def firsts(self) -> np.ndarray:
        """Numbers of the requests that wait for no answer."""
        return np.flatnonzero(self.after < 0)

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, i: Any) -> Any:
        numbers = range(len(self))[i]
        return self.make(numbers) if isinstance(numbers, int) else [self.make(n) for n in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def sent_as(self, arrival: str, seed: int) -> Trace:
        """Return the same requests with other arrivals, as of `openings`. Raises WorkloadError."""
        firsts, at = self.firsts, self.at.copy()
        opening = openings(arrival, len(firsts), seed, conversing=len(firsts) < len(self))
        at[firsts] = opening.at
        for i in np.flatnonzero(self.after >= 0):
            at[i] = at[self.after[i]]
        make = functools.partial(_sent_at, self.make, at, opening.users)
        return replace(self, make=make, at=at, users=opening.users)


def _sent_at(make: Callable[[int], Request], at: np.ndarray, users: int | None, i: int) -> Request:
    return make(i).model_copy(update={"at": float(at[i]), "users": users})


def openings(
    arrival: str, n: int, seed: int, scaled: bool = False, conversing: bool = False
) -> Arrivals:
    """Return the arrivals of n requests, or n conversations. Raises WorkloadError."""
    opening = arrivals(arrival, n, seed, scaled)
    if conversing and opening.users:
        raise WorkloadError(
            f"--arrival {arrival} sends a request after every answer, as conversations do already; "
            f"name another, such as poisson:2"
        )
    return opening


def save_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write a trace in our form. Raises Unwritten."""
    with written(path) as file:
        file.writelines(f"{each.model_dump_json(exclude_none=True)}\n" for each in requests)


def load_trace(path: Path) -> list[Request]:
    """Read a trace in our form. Raises WorkloadError naming the file and the line that is wrong."""
    return parsed(path, lines_of(path))


def lines_of(path: Path) -> list[str]:
    """Return the lines of a trace file. Raises WorkloadError."""
    try:
        lines = read_lines(path)
    except (OSError, ValueError) as error:
        hint = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        if isinstance(error, FileNotFoundError):
            hint = "; check the path"
            if (path.parent / "summary.json").exists():
                hint = (
                    f"; a trace of more than {MOST_SAVED:,} requests is not saved: give the "
                    "workload's own options, which report.md names, and the same seed"
                )
        raise WorkloadError(f"cannot read the trace {path}: {error}{hint}") from None
    if not any(map(str.strip, lines)):
        raise WorkloadError(f"{path} holds no requests")
    return lines


def parsed(path: Path, lines: Sequence[str]) -> list[Request]:
    """Return the requests of lines in our form. path: named in errors. Raises WorkloadError."""
    requests: dict[int, Request] = {}
    followed: set[int | None] = {None}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = Request.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = f"{first['loc'][0]}: " if first["loc"] else ""
            raise WorkloadError(
                f"{path}, line {number}: {field}{first['msg']}; a trace has a JSON object for each "
                f"request, with the fields in docs/measuring.md, or another form named there"
            ) from None
        if wrong := _wrong(request, requests, followed):
            raise WorkloadError(f"{path}, line {number}: {wrong}")
        requests[request.id] = request
        followed.add(request.after)
    if len({request.users for request in requests.values()}) > 1:
        raise WorkloadError(
            f"{path} names different numbers of users; a trace is one closed loop or none"
        )
    return list(requests.values())


def _wrong(request: Request, before: dict[int, Request], followed: set[int | None]) -> str | None:
    """Return the fault of a request, given those before it and the turns that others follow."""
    if (request.prompt is None) == (request.prompt_ids is None):
        return "give either prompt or prompt_ids"
    if not (request.prompt or request.prompt_ids):
        return "the prompt is empty"
    if why := missing(request.user) or missing(request.slo_class):
        return f"{why}; choose another name"
    if request.id in before:
        return f"an earlier line has the id {request.id} too; number the requests anew"
    if (request.after is None) != (request.think_s is None):
        return "a later turn of a conversation has both after and think_s, others have neither"
    if request.after is None:
        return None
    if request.after not in before:
        return f"after: no line before it has the id {request.after}"
    if request.after in followed:
        return f"after: another request follows {request.after} already; a conversation is a chain"
    if request.users:
        return "users: requests of a closed loop cannot follow others; leave out after or users"
    if request.prompt is not None and before[request.after].prompt is None:
        return "prompt: a text cannot go on from prompt_ids; give prompt_ids, the whole prompt"
    return None
