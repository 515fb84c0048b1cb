"""The order that ORDER names for vllm_order.py, and the expected lengths that PREDICTOR gives.

ORDER       an order of docs/policies.md and its settings, as "sjf --aging 5", or one of your own
            file, as mine.py:Mine (default: fcfs)
PREDICTOR   mine.py:length, a function that is given a prompt's ids and max_tokens, and returns the
            completion tokens to expect (default: max_tokens)

Needs the folder `scheduling` and sortedcontainers; pydantic is vLLM's. As a plugin of vLLM
(vllm_order-1.dist-info) it refuses a wrong ORDER before the model loads.
"""

from __future__ import annotations

import difflib
import os
import runpy
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from scheduling import user_policies
from scheduling.policies import ORDERS, Edf, Order

Predict = Callable[[Sequence[int], int], int]


class OrderError(Exception):
    """An ORDER or PREDICTOR that vLLM cannot have; the message names the fix."""


def check() -> None:
    """Refuse a wrong ORDER or PREDICTOR: vLLM calls it when it starts. Raises OrderError."""
    order_of(os.environ.get("ORDER", "fcfs"))
    predictor_of(os.environ.get("PREDICTOR", ""))


def order_of(text: str) -> Order:
    """Return the order of `NAME --setting X …`. Raises OrderError."""
    try:
        name, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise OrderError(f"ORDER={text!r}: {error}; write sjf or 'sjf --aging 5'") from None
    if user_policies.WORD.fullmatch(name):
        user_policies.load([name], {})
    if why := user_policies.problem(name):
        raise OrderError(why)
    kind = ORDERS.get(name)
    if kind is None:
        raise OrderError(
            f"unknown order {name!r}{_suggest(name, ORDERS)}; valid orders are "
            f"{', '.join(_that_sort())}, and FILE.py:NAME of your own"
        )
    if kind.preemptive and not issubclass(kind, Edf):
        raise OrderError(
            f"ORDER={name} pauses running rows, and vLLM computes all that run; choose one that "
            f"sorts what waits alone: {', '.join(_that_sort())}"
        )
    order = kind(**_settings(name, kind, words))
    try:
        order.weights  # noqa: B018  (their readers refuse wrong texts)
        if order.queue_policies:
            raise OrderError(
                "--queue-policy refuses requests, and vLLM's core cannot; leave it out"
            )
    except ValueError as error:
        raise OrderError(str(error)) from None
    return order


def _that_sort() -> Iterator[str]:
    return (name for name, kind in ORDERS.items() if not kind.preemptive or kind is Edf)


def _settings(name: str, kind: type[Order], words: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `--setting X` or `--setting=X` give. Raises OrderError."""
    known = {f"--{each.name.replace('_', '-')}": each for each in fields(kind)}
    types, found = get_type_hints(kind), dict[str, Any]()
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag not in known:
            has = f"{name} has {', '.join(known) or 'no settings'}"
            raise OrderError(f"unknown flag {flag}{_suggest(flag, known)}; {has}")
        value = value if equals else next(left, "")
        field = known[flag]
        given: Any = value.split(",") if types[field.name] == tuple[int, ...] else value
        type_: Any = Annotated[types[field.name], Field(**field.metadata["limits"])]
        try:
            found[field.name] = TypeAdapter(type_).validate_python(given)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise OrderError(f"{flag} {value!r}: {said[0].lower()}{said[1:]}") from None
    return found


def _suggest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def predictor_of(word: str) -> Predict:
    """Return the function FILE.py:NAME, or of nothing max_tokens. Raises OrderError."""
    if not word:
        return lambda prompt_ids, max_tokens: max_tokens
    path, _, name = word.rpartition(":")
    try:
        predict: Predict = runpy.run_path(path)[name]
    except BaseException as error:  # whatever a user's file does
        raise OrderError(
            f"PREDICTOR={word} cannot be used: {user_policies.described(error, path)}; write "
            "FILE.py:NAME of a function of prompt ids and max_tokens"
        ) from None
    return predict


def recorded(text: str, order: Order) -> Mapping[str, str]:
    """Return what a recording's first line says of an order."""
    source = user_policies.SOURCES.get(type(order))
    return {"order": text} | ({"order_sha256": source.sha256} if source else {})
