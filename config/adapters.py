"""LoRA adapters as settings name them: in folders, or random ones for measurements."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from generate.kernels import LARGEST_RANK

if TYPE_CHECKING:
    from config.config import Config

NAME = re.compile("[A-Za-z0-9._/-]{1,128}")


class Source(NamedTuple):
    """Source of an adapter: a folder or, where that is empty, a rank and a seed."""

    folder: str
    rank: int = 0
    seed: int = 0


def check_name(name: str) -> None:
    """Raise ValueError for a name that no adapter may have."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name[:128]!r} is no name; use 1 … 128 letters, digits and ._-/")


def read_lora(text: str) -> dict[str, Source]:
    """Return the adapters of "NAME=FOLDER,NAME=FOLDER", with whole paths. Raises ValueError."""
    adapters: dict[str, Source] = {}
    for each in text.split(",") if text else ():
        name, _, folder = each.partition("=")
        check_name(name)
        if not folder or name in adapters:
            raise ValueError(f"{name} must have one folder; write NAME=FOLDER,NAME=FOLDER")
        adapters[name] = Source(os.path.abspath(os.path.expanduser(folder)))
    return adapters


def read_lora_random(text: str) -> dict[str, Source]:
    """Return the adapters of "N:RANK". Raises ValueError."""
    found = re.fullmatch("([1-9][0-9]{0,3}):([1-9][0-9]?)", text)
    if text and not (found and int(found[2]) <= LARGEST_RANK):
        raise ValueError(
            f"must be N:RANK, such as 8:16: how many, and a rank of 1 … {LARGEST_RANK}"
        )
    n, rank = map(int, found.groups()) if found else (0, 0)
    return {f"lora-{i}": Source("", rank, i) for i in range(n)}


def unfit_adapters(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction between adapters and other settings."""
    if config.lora and config.model == "fake":
        yield "--lora's folders hold weights, and the model fake has none; use --lora-random"
    if config.lora_slots and config.linear == "triton":
        yield "linear triton cannot add adapters; leave --linear or the adapters out"
    taken = {config.model_name, *read_lora_random(config.lora_random)}
    for name in sorted(taken & read_lora(config.lora).keys()):
        yield f"--lora names an adapter {name}, which is another model's name; choose another name"
