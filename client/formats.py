"""Forms of trace files, told apart by their content; `rows` reads any of them:

tables        CSV with the columns of Azure's, BurstGPT's or Vidur's traces
JSON lines    Mooncake's fields, with what aiperf and Alibaba's Bailian add; else ours
JSON          ShareGPT's conversations
text          a prompt in each line
"""

from __future__ import annotations

import contextlib
import csv
import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from client.draws import MOST, WorkloadError
from client.traces import Request, parsed
from client.wire import utf8
from config.reading import parse

NAMES = {  # names of columns, and of keys in JSON lines, by what they hold
    "at": ("timestamp", "arrived_at"),
    "tokens": ("contexttokens", "request tokens", "num_prefill_tokens", "input_length"),
    "num_tokens": ("generatedtokens", "response tokens", "num_decode_tokens", "output_length"),
    "said": ("text_input", "messages"),
    "blocks": ("hash_ids",),
    "session": ("session id", "session_id"),
    "turn": ("session_turn_index",),
    "elapsed": ("elapsed time",),  # from a request to the end of its answer
    "delay": ("delay",),  # from the answer before it to a request
}
TIMES = ("at", "elapsed", "delay")
HOLDS = {name: holds for holds, names in NAMES.items() for name in names}
UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "μs": 1.0}  # in microseconds
NAMED_UNIT = re.compile(f"(.+?) ?[_ (]({'|'.join(UNITS)})[)]?")  # arrived_at_ms, Timestamp (us)
BAILIAN = "chat_id"  # a key that its lines alone have
BLOCK, BAILIAN_BLOCK = 512, 16  # tokens that a hash id stands for
ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")
TALKS = '[{"conversations": [{"from": "human", "value": "…"}, …]}, …]'
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOST_US = 1e24
CJK = "\u3001-\u9fff\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"  # without spaces
PIECES = re.compile(rf"[{CJK}]|[^\W{CJK}]+|[^\w\s]")
CountTokens = Callable[[str], int]
KNOWN = "docs/measuring.md lists the forms of traces"


@dataclass(slots=True)
class RecordedRow:
    """A request of a file, without its ids; times in microseconds.

    text: the prompt's, or None. own: its part that is new, if this is a later turn. tokens:
    their number in a prompt without text; adds: in a later turn they follow all that was said
    before. num_tokens: 0 where it failed, None where none are recorded. blocks: hash ids, each of
    `block` tokens.
    """

    at: float | None = None
    text: str | None = None
    own: str = ""
    tokens: int = 0
    adds: bool = False
    num_tokens: int | None = None
    blocks: Sequence[int] = ()
    block: int = BLOCK
    session: Any = None
    turn: int = 0
    elapsed: float = 0.0
    delay: float | None = None
    id: int = 0
    after: int | None = None
    think_s: float | None = None
    stream: int = 0  # the conversation whose ids follow the blocks
    request: Request | None = None  # a request of a file in our form
    line: int = 0  # a line of a table, or of others' JSON lines


def rows(
    path: Path, lines: Sequence[str], of_prompts: bool, unit: str | None, count: CountTokens
) -> Iterator[RecordedRow]:
    """Return the rows of a file, in its order. of_prompts: its lines may be prompts. unit: its
    times', whatever it says. count: counts a text's tokens. Raises WorkloadError, which
    names the line.
    """
    number, first = next((n, each.strip()) for n, each in enumerate(lines, 1) if each.strip())
    names: Iterable[str] = ()
    with contextlib.suppress(ValueError, csv.Error):  # its reader will say what is wrong
        names = parse(first) if first[0] == "{" else next(csv.reader([first]))
    holds = {column[0] for column in map(_column, names) if column}
    if holds and first[0] == "{":
        return _recorded(path, lines, 0, (), unit)
    if {"tokens", "num_tokens"} <= holds:
        return _recorded(path, lines, number, [*names], unit)
    if unit:
        raise WorkloadError(f"{path}: its times, if any, are in seconds; leave out --time-unit")
    if first[0] == "{":
        return map(_ours, parsed(path, lines))
    if first[0] == "[":
        return _talks(path, "\n".join(lines), count)
    if not of_prompts:
        table = "a table begins with arrived_at,num_prefill_tokens,num_decode_tokens, say"
        why = f"it is no trace: {table}; add --lengths if each line is a prompt ({KNOWN})"
        raise WorkloadError(f"{path}, line {number}: {why}")
    return (RecordedRow(text=utf8(line.strip())) for line in lines if line.strip())


def _ours(request: Request) -> RecordedRow:
    return RecordedRow(
        text=request.prompt, tokens=len(request.prompt_ids or ()), num_tokens=request.num_tokens,
        id=request.id, after=request.after, request=request,
    )  # fmt: skip


def _recorded(
    path: Path, lines: Sequence[str], begins: int, header: Sequence[str], unit: str | None
) -> Iterator[RecordedRow]:
    """Yield the rows of a table below its header, or of JSON lines. Raises WorkloadError."""
    for number, line in enumerate(lines, 1):
        if number <= begins or not line.strip():
            continue
        try:
            cells, columns = next(csv.reader([line])) if header else (), len({*header})
            if len(cells) != columns:
                raise ValueError(f"{len(cells)} values for {columns} columns; give one for each")
            values = dict(zip(header, cells)) if header else parse(line)
            if not isinstance(values, dict):
                raise ValueError("give a JSON object in each line")
            row = _row(values, unit, "s" if header or BAILIAN in values else "ms")
        except (ValueError, csv.Error) as error:
            raise WorkloadError(f"{path}, line {number}: {error}; {KNOWN}") from None
        row.line = number
        yield row


def _row(values: dict[str, Any], unit: str | None, of_form: str) -> RecordedRow:
    """Return a row of named values; of_form: the unit of times that name none. Raises ValueError,
    which names the value.
    """
    held: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, value in values.items():
        if not (column := _column(name)) or value is None or value == "":
            continue
        holds, own_unit = column
        if named.setdefault(holds, name) != name:
            raise ValueError(f"{named[holds]} and {name} mean the same; leave one of them out")
        read, kind = READ.get(holds, (None, "a time"))
        try:
            factor = UNITS[unit or own_unit or of_form]
            held[holds] = read(value) if read else _microseconds(value, factor)
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError):
            raise ValueError(f"{name}: {reprlib.repr(value)} is not {kind}") from None
    text, own = held.pop("said", (None, ""))
    row = RecordedRow(
        **held, text=text, own=own, block=BAILIAN_BLOCK if BAILIAN in values else BLOCK
    )
    row.adds = "input_length" in values and bool(row.session)
    most = -(-row.tokens // row.block)
    if row.blocks and not row.tokens // row.block <= len(row.blocks) <= most:
        raise ValueError(
            f"{len(row.blocks)} hash_ids for {row.tokens} tokens; one for each {row.block} of "
            f"them, begun or full, would be {most}"
        )
    return row


@functools.lru_cache(1024)
def _column(name: str) -> tuple[str, str | None] | None:
    """Return what a column holds, and the unit of times that its name states."""
    plain = name.strip().lower()
    if holds := HOLDS.get(plain):
        return holds, None
    found = NAMED_UNIT.fullmatch(plain)
    holds = found and HOLDS.get(found[1])
    return (holds, found[2]) if found and holds in TIMES else None


def _microseconds(value: Any, factor: float) -> float:
    """Return a number times the factor, or the time of a wall clock (UTC unless it says)."""
    if isinstance(value, str) and value.strip()[4:5] == "-":
        moment = datetime.fromisoformat(value.strip())
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        value, factor = (moment - EPOCH) // timedelta(microseconds=1), 1.0
    at = math.nan if isinstance(value, bool) else float(value) * factor
    if not 0 <= at <= MOST_US:
        raise ValueError
    return at


def _said(value: Any) -> tuple[str, str]:
    """Return a text, or that of OpenAI's messages, and what is new in it: after an answer."""
    texts, own = [value], 0
    if not isinstance(value, str):
        texts = [message["content"] or "" for message in value]
        own = max((k for k, each in enumerate(value, 1) if each["role"] == "assistant"), default=0)
    return utf8("\n".join(texts)), utf8("\n".join(texts[own:]))


WHOLE = TypeAdapter(Annotated[int, Field(ge=0, le=MOST)]).validate_python
IDS = TypeAdapter(list[Annotated[int, Field(strict=True, ge=0, lt=2**64)]]).validate_python
READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("tokens", "num_tokens", "turn"), (WHOLE, "a whole number from 0 to 10⁹")),
    "said": (_said, "a text, or a list of messages with texts"),
    "blocks": (IDS, "a list of whole numbers"),
    "session": (lambda value: str(value).strip(), "a name"),
}


def about_tokens(text: str) -> int:
    """Return about how many tokens a text has, whatever the tokenizer."""
    return sum(max(1, len(piece) // 4) for piece in PIECES.findall(text))


def _talks(path: Path, text: str, count: CountTokens) -> Iterator[RecordedRow]:
    """Yield the turns of ShareGPT's conversations. Raises WorkloadError."""
    try:
        for k, talk in enumerate(parse(text), 1):
            said: list[str] = []
            for turn in [*talk["conversations"], {"from": ANSWERING[0], "value": ""}]:
                if turn["from"] not in ANSWERING:
                    said.append(turn["value"])
                elif said:  # it may begin with an answer
                    own, num_tokens = utf8("\n".join(said)), count(turn["value"])
                    yield RecordedRow(text=own, own=own, num_tokens=num_tokens, session=k)
                    said = []
    except (ValueError, TypeError, LookupError) as error:
        raise WorkloadError(f"{path}: it is not {TALKS}: {error}; {KNOWN}") from None
