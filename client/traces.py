"""Traces: files of JSON lines, one request each, saved and read, in our form or in Mooncake's.

Mooncake's public traces hold no texts: of each request when it came (`timestamp`, in milliseconds),
how many tokens it had and got (`input_length`, `output_length`), and an id for each 512 tokens of
its prompt (`hash_ids`), equal where the prompt is the same so far.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from client.columns import MOST
from client.data import Request, rescheduled
from client.draws import WorkloadError
from client.prompts import TokenIds

BLOCK = 512  # tokens that a hash id of Mooncake's stands for
SCALES = [2**k for k in range(BLOCK.bit_length())]
Line = TypeVar("Line", bound=BaseModel)


class Mooncake(BaseModel):
    """One line of a trace in Mooncake's format."""

    model_config = ConfigDict(extra="forbid", strict=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: list[Annotated[int, Field(ge=0)]]


def save_trace(path: Path, requests: Sequence[Request]) -> None:
    path.write_text(
        "".join(request.model_dump_json(exclude_none=True) + "\n" for request in requests)
    )


def load_trace(path: Path, scale: int | None = None) -> list[Request]:
    """Read a trace; scale: tokens that a block of Mooncake's becomes (none: 512, as it is).

    Raises WorkloadError naming the file and the line that is wrong.
    """
    return _read(path, scale)[0]


def replayed(
    path: Path, scale: int | None, arrival: str | None, seed: int
) -> tuple[Sequence[Request], dict[str, Any]]:
    """The requests of a trace, sent as `arrival` says if it says anything, and how a report names
    them. Raises WorkloadError.
    """
    requests, scale = _read(path, scale)
    where = f"as in {path}"
    told = {"lengths": where, "arrival": arrival or where} | ({"scale": scale} if scale else {})
    return rescheduled(requests, arrival, seed) if arrival else requests, told


def _read(path: Path, scale: int | None) -> tuple[list[Request], int | None]:
    """The requests, and the scale of a trace in Mooncake's format; None of one in ours."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = ""
        if isinstance(error, FileNotFoundError) and (path.parent / "summary.json").exists():
            hint = (
                f"; a trace of more than {MOST:,} requests is not saved: give the workload's own "
                f"options, which report.md names, and the same seed"
            )
        raise WorkloadError(f"cannot read the trace {path}: {error}{hint}") from None
    if not lines:
        raise WorkloadError(f"{path} holds no requests")
    if _is_mooncakes(lines[0]):
        return _of_mooncake(path, lines, scale or BLOCK), scale or BLOCK
    if scale:
        raise WorkloadError(
            f"{path} is no trace in Mooncake's format, and its prompts cannot be scaled; leave out "
            f"--scale"
        )
    return _of_ours(path, lines), None


def _is_mooncakes(line: str) -> bool:
    try:
        keys = json.loads(line)
    except ValueError:
        return False
    return isinstance(keys, dict) and not keys.keys().isdisjoint(Mooncake.model_fields)


def _of_mooncake(path: Path, lines: Sequence[str], scale: int) -> list[Request]:
    found = []
    for number, line in enumerate(lines, 1):
        found.append(told := _parsed(Mooncake, line, f"{path}, line {number}"))
        if len(told.hash_ids) != (blocks := _scaled(told.input_length, 1)):
            raise WorkloadError(
                f"{path}, line {number}: {len(told.hash_ids)} hash_ids for {told.input_length} "
                f"tokens; one for each {BLOCK} of them, begun or full, would be {blocks}"
            )

    @functools.cache
    def block(hash_id: int) -> list[int]:
        """The same ids wherever this block occurs, in this trace or another."""
        [ids] = TokenIds(np.random.default_rng([hash_id, 7]), [scale])
        return ids

    start = min(told.timestamp for told in found)
    return [
        Request(
            id=i,
            at=round((told.timestamp - start) / 1e3, 6),
            prompt_ids=[token for hash_id in told.hash_ids for token in block(hash_id)][
                : _scaled(told.input_length, scale)
            ],
            num_tokens=_scaled(told.output_length, scale),
            seed=i,
        )
        for i, told in enumerate(found)
    ]


def _scaled(tokens: int, scale: int) -> int:
    return -(-tokens * scale // BLOCK)


def _of_ours(path: Path, lines: Sequence[str]) -> list[Request]:
    requests: dict[int, Request] = {}
    followed: set[int] = set()
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        request = _parsed(Request, line, where)
        if (request.prompt is None) == (request.prompt_ids is None):
            raise WorkloadError(f"{where}: give either prompt or prompt_ids")
        if not (request.prompt or request.prompt_ids):
            raise WorkloadError(f"{where}: the prompt is empty")
        if request.id in requests:
            raise WorkloadError(
                f"{where}: an earlier line has the id {request.id} too; number the requests anew"
            )
        if wrong := _wrong_turn(request, requests, followed):
            raise WorkloadError(f"{where}: {wrong}")
        requests[request.id] = request
        if request.after is not None:
            followed.add(request.after)
    if len({request.users for request in requests.values()}) > 1:
        raise WorkloadError(
            f"{path} names different numbers of users; a trace is one closed loop or none"
        )
    return list(requests.values())


def _wrong_turn(request: Request, before: dict[int, Request], followed: set[int]) -> str | None:
    """What is wrong with a request as the turn of a conversation, given those before it."""
    if (request.after is None) != (request.think_s is None):
        return "a later turn of a conversation has both after and think_s, others have neither"
    if request.after is None:
        return None
    if request.after not in before:
        return f"after: no line before it has the id {request.after}"
    if request.after in followed:
        return f"after: another request follows {request.after} already; a conversation is a chain"
    if request.users:
        return "users: the requests of a closed loop follow nobody; leave out after or users"
    if request.prompt is None or before[request.after].prompt is None:
        return "the turns of a conversation are text, as answers are; give prompt, not prompt_ids"
    return None


def _parsed(kind: type[Line], line: str, where: str) -> Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = f"{first['loc'][0]}: " if first["loc"] else ""
        raise WorkloadError(f"{where}: {field}{first['msg']}") from None
