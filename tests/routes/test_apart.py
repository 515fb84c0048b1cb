"""A prefill and a decode server beside one that does both: the same answers, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from client.calls import get
from routes.prefill import PrefillServer
from scheduling.inference import Inference
from tests.fronts import JSON, Response, fetch
from tests.servers import PATIENCE_S, free_port, server, wait_until_free
from tests.sse import events
from wire.refusals import Refused

LONG = "If the file object is a list of filenames, and when the filename"  # 4 KV blocks
DRAWN = {"prompt": LONG, "num_tokens": 20, "seed": 3}
COMPLETION = {"prompt": LONG, "max_tokens": 40, "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "seed": 1}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/inference", DRAWN | {"num_tokens": 60, "temperature": 0}),
    ("/inference", DRAWN | {"prompt": [LONG, "If"], "n": 3}),
    ("/inference", DRAWN | {"num_tokens": 1, "echo": True}),
    ("/v1/completions", COMPLETION | {"stop": ["e", " "], "n": 3}),
    ("/v1/completions", COMPLETION | {"frequency_penalty": 1.5}),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION | {"max_tokens": 2000}),
]
STREAM = COMPLETION | {"stream": True, "n": 2}


def streamed(response: Response) -> list[str]:
    choices = [piece["choices"][0] for piece in events(response.body)]
    return ["".join(each["text"] for each in choices if each["index"] == i) for i in range(2)]


def asked(url: str, tokens: int = 5) -> Refused:
    """What a decode server answers if the one that is to compute a prompt does not."""
    ours: Any = SimpleNamespace(
        manager=SimpleNamespace(clock=lambda: 0.0), seconds_until=lambda deadline: PATIENCE_S
    )
    with pytest.raises(Refused) as caught:
        body = json.dumps(DRAWN | {"num_tokens": tokens}).encode()
        PrefillServer(ours, url).compute([Inference([1], 2)], "/inference", body, JSON)
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
        texts, same = [streamed(fetch(u, "POST", "/v1/completions", STREAM)) for u in (one, decode)]
        assert texts == same
        for url in (prefill, decode):
            wait_until_free(url)
        first, rest, all_ = (get(f"{url}/stats") for url in (prefill, decode, one))
        assert first["total_output_tokens"] == 15, "a token of each completion"
        assert 15 + rest["live_rows"] == all_["total_output_tokens"], "and each other one there"
        refused = fetch(decode, "POST", "/v1/completions", COMPLETION | {"logprobs": 1})
        assert refused.status == 400 and b"have none; leave them out" in refused.body
        own = asked(prefill, tokens=5000)
        assert own.code == "context_length_exceeded" and "beyond the context" in str(own)
        assert asked(one).code == "no_prefill_server"
    assert asked(f"http://127.0.0.1:{free_port()}").code == "prefill_server_failed"
