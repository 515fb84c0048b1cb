"""A prefill and a decode server: the answers of one that does both, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from client.calls import get
from config import build
from routes.handover import PrefillServer, packed, unpack
from scheduling.handover import Handover
from scheduling.inference import Inference
from tests.fronts import JSON, fetch
from tests.servers import PATIENCE_S, events, free_port, server, wait_until_free
from wire.refusals import Refused

LONG = "If the file object is a list of filenames, and when the filename"  # 4 KV blocks
DRAWN = {"prompt": LONG, "num_tokens": 20, "seed": 3}
COMPLETION = {"prompt": LONG, "max_tokens": 40, "seed": 3}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/inference", DRAWN | {"num_tokens": 60, "temperature": 0}),
    ("/inference", DRAWN | {"prompt": [LONG, "If"], "n": 3}),
    ("/inference", DRAWN | {"num_tokens": 1, "echo": True}),
    ("/v1/completions", COMPLETION | {"stop": ["e", " "], "n": 3}),
    ("/v1/completions", COMPLETION | {"frequency_penalty": 1.5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
]


def streamed(url: str) -> str:
    found = events(fetch(url, "POST", "/v1/completions", COMPLETION | {"stream": True}).body)
    return "".join(piece["choices"][0]["text"] for piece in found)


def asked(url: str, tokens: int = 5) -> Refused:
    """What a decode server answers if the one that is to compute a prompt does not."""
    manager = SimpleNamespace(clock=lambda: 0.0)
    ours: Any = SimpleNamespace(manager=manager, seconds_until=lambda deadline: PATIENCE_S)
    body = json.dumps(DRAWN | {"num_tokens": tokens}).encode()
    with pytest.raises(Refused) as caught:
        PrefillServer(ours, url).begin([Inference([1], 2)], "/inference", body, JSON)
    return caught.value


def test_the_answers_of_a_pair_are_those_of_one_server() -> None:
    with (
        server("dynamic", {"prefill_only": True}) as prefill,
        server("dynamic", {"prefill_url": prefill}) as decode,
        server("dynamic", {}) as one,
        ThreadPoolExecutor(8) as pool,
    ):
        both = [[pool.submit(fetch, url, "POST", *ask) for url in (one, decode)] for ask in ASKS]
        for expected, answer in both:
            assert answer.result().masked == expected.result().masked
        assert streamed(decode) == streamed(one)
        for url in (prefill, decode):
            wait_until_free(url)
        first, rest, all_ = (get(f"{url}/stats") for url in (prefill, decode, one))
        assert first["total_output_tokens"] == 14, "one of each completion"
        assert 14 + rest["live_rows"] == all_["total_output_tokens"]
        refused = fetch(decode, "POST", "/v1/completions", COMPLETION | {"logprobs": 1})
        assert refused.status == 400 and b"has none; leave it out" in refused.body
        own = asked(prefill, tokens=5000)
        assert own.code == "context_length_exceeded" and "beyond the context" in str(own)
        assert asked(one).code == "no_prefill_server"
    assert asked(f"http://127.0.0.1:{free_port()}").code == "prefill_server_failed"


def sent(**settings: Any) -> bytes:
    """The answer to a prompt of two KV blocks."""
    config, first = build("dynamic", {"model": "demo"} | settings, {}), Inference([1] * 17, 1)
    first.tokens, first.handed = [7], Handover(bytearray(2 * config.block_bytes))
    wants_more: Any = SimpleNamespace(group=[first], request=SimpleNamespace(num_tokens=5))
    return packed(config, wants_more).body


@pytest.mark.parametrize(("body", "error"), [
    (sent(weights="random"), "weights 'random' and this one 'pretrained'; start both"),
    (sent(block_size=32), "block_size 32 and this one 16"),
    (sent()[:-1], "bytes of keys and values instead of"),
    (sent().replace(b"[7,", b"[7,7,"), "too many values"),
    (b"{}", "'of'"),
])  # fmt: skip
def test_keys_and_values_of_another_model_or_size_are_refused(body: bytes, error: str) -> None:
    with pytest.raises((Refused, ValueError, LookupError), match=error):
        unpack(build("dynamic", {"model": "demo"}, {}), body, [Inference([1] * 17, 5)], 0.0, 0.0)
