"""What a prefill server sends: refused where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from config import build
from scheduling.handover import Handover
from scheduling.inference import Inference
from wire.handover import packed, unpack
from wire.refusals import Refused

DEMO = {"model": "demo", "device": "cpu"}


def group(n: int = 2) -> list[Inference]:
    return [Inference([1] * 17, 5) for _ in range(n)]


def sent(**settings: Any) -> bytes:
    """What is sent for a group of two, with prompts of two blocks of 16 tokens."""
    config, firsts = build("dynamic", DEMO | settings, {}), group()
    for first in firsts:
        first.tokens, first.handed = [7], Handover(bytearray(2 * config.block_bytes))
    return packed(config, firsts, goes_on=True).body


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"weights": "random", "weights_seed": 3}, "weights 'random' and this one 'pretrained'"),
        ({"kv_dtype": "int8"}, "kept_as 'int8' and this one 'float32'"),
        ({"block_size": 32}, "block_size 32 and this one 16"),
        ({"model": "demo-draft"}, "model_name 'demo-draft' and this one 'demo'"),
    ],
)
def test_keys_and_values_of_another_model_or_form_are_refused(
    settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(Refused, match=f"The prefill server has {name}; start both with the same"):
        unpack(build("dynamic", DEMO, {}), sent(**settings), group(), 0.0, 0.0)


@pytest.mark.parametrize(
    "body", [sent()[:-1], sent() + b"\0", b"{}\n", b"[]", b"\x80", sent().replace(b"[7,", b"[7,7,")]
)
def test_what_is_no_whole_answer_is_an_error(body: bytes) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        unpack(build("dynamic", DEMO, {}), body, group(), 0.0, 0.0)


def test_as_many_first_tokens_as_inferences_are_wanted() -> None:
    with pytest.raises(ValueError):
        unpack(build("dynamic", DEMO, {}), sent(), group(3), 0.0, 0.0)
