"""Log-probabilities, penalties and min_tokens, against one pass over the whole, and on HTTP."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flask.testing import FlaskClient

import generate.scoring
from generate.checkpoint import load_model
from generate.naive import NaiveGenerator
from generate.padded import PaddedGenerator
from generate.sampling import penalized, sample, sample_on_cpu
from generate.tokenizer import load_tokenizer
from model import GPT2
from scheduling.inference import Inference
from scheduling.policies import Dynamic, NoBatching, Policy
from scheduling.sampling import Sampling, Score, Scores
from server.api.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from server.api.logprobs import Logprobs
from tests.counts import nightly_but
from tests.oracle import N_VOCAB, POLICIES, SHAPE, Guesses, engine, enliven, serve, workload
from tests.servers import ClientOf, events

DEMAND = Dynamic(kv_reservation="demand")
SAMPLED = Sampling(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.2)
ASK: dict[str, Any] = {"prompt": "If é is", "max_tokens": 8, "temperature": 0.8, "seed": 3}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 3}


@pytest.fixture(scope="module")
def model() -> GPT2:
    return enliven(load_model(SHAPE, None, seed=3, dtype=torch.float32, device="cpu"))


def scored(n: int, sampling: Sampling) -> list[Inference]:
    """Requests that want scores, of their prompts too; every third wants none."""
    asked = workload(n, sampling)
    for i, inference in enumerate(asked):
        first = 1 if i % 3 else len(inference.prompt_ids)
        inference.scores = Scores(i % 4, first) if i % 3 < 2 else None
    return asked


def check(model: GPT2, inferences: list[Inference]) -> None:
    """Each score is the log-softmax of one pass over the whole sequence. Sums of another order, and
    the model's large weights, make a difference of 0.00008 on a processor without AVX.
    """
    for inference in inferences:
        scores, length = inference.scores, len(inference.prompt_ids) + len(inference.tokens)
        if scores is None:
            continue
        naive = NaiveGenerator(model, N_VOCAB)
        logits = naive.logits(inference, length, 1)[:, :N_VOCAB]  # [T, V]
        expected = logits.detach().log_softmax(-1)
        assert len(scores.of) == length - scores.first
        for position, score in enumerate(scores.of, scores.first):
            row = expected[position - 1]
            assert score.logprob == pytest.approx(row[inference.token(position)].item(), abs=1e-3)
            assert len(score.top) == scores.top
            values = row.topk(scores.top).values.tolist() if scores.top else []
            assert [value for _, value in score.top] == pytest.approx(values, abs=1e-3)
            assert [row[id_].item() for id_, _ in score.top] == pytest.approx(values, abs=1e-3)


@pytest.mark.parametrize(
    "path", nightly_but(["kernels in one call"], ["plain", "kernels in one call"])
)
def test_scores_are_log_softmaxes(model: GPT2, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.scoring, "PASS", 7)  # smaller than prompts and than their chunks
    expected = serve(NoBatching(), NaiveGenerator(model, N_VOCAB), workload(12, SAMPLED))
    preempted = 0
    policies: list[Policy] = [*POLICIES, DEMAND]
    for policy in policies:
        asked = scored(12, SAMPLED)
        n_blocks = 17 if policy is DEMAND else 80
        cached = engine(model, n_blocks, 4, path)
        assert serve(policy, cached, asked, n_blocks=n_blocks) == expected, "scores change no token"
        check(model, asked)
        drafted = scored(12, SAMPLED)
        cached.drafter = Guesses(drafted, expected)
        assert serve(policy, cached, drafted, n_blocks=n_blocks, speculate=3) == expected
        check(model, drafted)
        preempted += sum(inference.interruptions.preemptions for inference in asked)
    assert preempted > 3, "what is computed again is not scored again"
    ways = "apart", "together"
    rectangles = [PaddedGenerator(model, N_VOCAB, sample, way) for way in ways]
    for other in (NaiveGenerator(model, N_VOCAB), *rectangles):
        asked = scored(12, SAMPLED)
        assert serve(Dynamic(), other, asked) == expected
        check(model, asked)


def by_hand(model: GPT2, inference: Inference) -> list[int]:
    """Greedy, with OpenAI's formula written out."""
    how, tokens = inference.sampling, list[int]()
    naive = NaiveGenerator(model, N_VOCAB)
    while len(tokens) < inference.num_tokens:
        so_far = fresh(inference, tokens)
        logits = naive.logits(so_far, len(so_far.prompt_ids) + len(tokens))[0, :N_VOCAB].tolist()
        for id_ in range(N_VOCAB):
            n = tokens.count(id_)
            logits[id_] -= n * how.frequency_penalty + (n > 0) * how.presence_penalty
            if len(tokens) < how.min_tokens and id_ in how.stop_ids:
                logits[id_] = -1e9
        best, second, *_ = sorted(logits, reverse=True)
        assert best - second > 1e-5, "choose another seed: this decision is a near-tie"
        tokens.append(logits.index(best))
        if tokens[-1] in how.stop_ids:
            break
    return tokens


def fresh(inference: Inference, tokens: Sequence[int] = ()) -> Inference:
    stops = frozenset(inference.sampling.stop_ids)
    stop = stops.__contains__ if stops else None
    given = inference.prompt_ids, inference.num_tokens, inference.sampling
    return Inference(*given, stop=stop, tokens=[*tokens])


def test_penalties_and_min_tokens_are_each_rows_own_in_every_mode(model: GPT2) -> None:
    rng = random.Random(2)
    asked = workload(12, Sampling())
    for i, inference in enumerate(asked):
        stops = tuple(rng.sample(range(N_VOCAB), 90)) if i % 2 else ()
        inference.sampling = Sampling(
            presence_penalty=rng.choice([0, 1.5, -2.0]) if i % 3 else 0.0,
            frequency_penalty=rng.choice([0, 0.7, -1.0]) if i % 3 else 0.0,
            min_tokens=rng.randint(0, inference.num_tokens),
            stop_ids=stops,
        )
    expected = [by_hand(model, inference) for inference in asked]
    plain = [by_hand(model, replace(i, sampling=Sampling())) for i in map(fresh, asked)]
    ends = [len(found) < i.num_tokens for found, i in zip(expected, asked)]
    assert any(ends) and sum(a != b[: len(a)] for a, b in zip(expected, plain)) > 4
    for policy in [*POLICIES, DEMAND]:
        for speculate in (0, 3):
            cached, again = engine(model, 80, 4), [fresh(each) for each in asked]
            cached.drafter = Guesses(again, expected)
            assert serve(policy, cached, again, speculate=speculate) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_penalties_keep_their_logits_and_cost_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = Inference([1], 9, tokens=[4, 4])
    assert penalized(logits, [(plain, ())] * 3) is logits
    how = Sampling(1.0, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=3, stop_ids=(7,))
    one = replace(plain, tokens=[4], sampling=how)  # and a draft token after it
    found = penalized(logits.clone(), [(plain, ()), (one, [4]), (plain, ())])
    expected = logits.float()
    expected[1, 4] -= 0.5 + 2 * 0.25
    expected[1, 7] = -torch.inf
    assert torch.equal(found, expected)
    draws = [(replace(how, seed=seed), 2) for seed in range(3)]
    assert torch.equal(*(draw(found, draws, N_VOCAB) for draw in (sample, sample_on_cpu)))


@pytest.fixture
def client(client_of: ClientOf) -> FlaskClient:
    return client_of(model="demo", prefix_caching=True)


def ask(client: FlaskClient, path: str = "/v1/completions", **body: Any) -> Any:
    """What it answers, as the document describes it."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.data
    streams, chats = bool(body.get("stream")), "chat" in path
    result = events(response.data) if streams else response.get_json()
    whole, piece = (ChatCompletion, ChatCompletionChunk) if chats else (Completion, CompletionChunk)
    for each in result if streams else [result]:
        (piece if streams else whole).model_validate(each)
    return result


def joined(chunks: list[Any]) -> dict[str, list[Any]]:
    """The logprobs of a stream as those of a plain answer."""
    result: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            result.setdefault(name, []).extend(values)
    return result


def test_completions_have_openais_lists_and_streams_the_same(client: FlaskClient) -> None:
    for _ in range(2):  # the second could find its prompt in the prefix cache
        [choice] = ask(client, **ASK, echo=True, logprobs=2)["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:] and len(logprobs["tokens"]) == 16
    assert text.startswith("If é is")
    assert logprobs["tokens"][3:5] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"][3:6] == [3, 3, 4]
    for token, logprob, top, at in zip(*logprobs.values()):
        if not token.startswith("bytes:"):
            assert text[at] == token
        if top is not None:
            assert top[token] == logprob and 2 <= len(top) <= 3 and max(top.values()) >= logprob
    assert joined(ask(client, **ASK, echo=True, logprobs=2, stream=True)) == logprobs
    [alone] = ask(client, **ASK, logprobs=0)["choices"]
    assert alone["logprobs"]["tokens"] == logprobs["tokens"][8:]
    expected = pytest.approx(logprobs["token_logprobs"][8:], abs=1e-4)
    assert alone["logprobs"]["token_logprobs"] == expected
    assert alone["logprobs"]["text_offset"][0] == 0
    [none] = ask(client, **ASK)["choices"]
    assert none["logprobs"] is None and none["text"] == alone["text"]


def test_tokens_that_a_text_does_not_show_take_no_characters_of_it() -> None:
    """With ignore_eos an end-of-text is in the middle."""
    scores = Scores(0, 1, [Score(-1.0, [])] * 3)
    inference = Inference([65], 3, tokens=[97, 256, 98], scores=scores)
    logprobs = Logprobs(load_tokenizer("bytes"), inference, False, {256})
    assert logprobs.completion(3)["text_offset"] == [0, 1, 1]


def test_a_chat_has_an_entry_for_each_token(client: FlaskClient) -> None:
    path = "/v1/chat/completions"
    [choice] = ask(client, path, **CHAT, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode()) and len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"]
    streamed = joined(ask(client, path, **CHAT, logprobs=True, top_logprobs=3, stream=True))
    assert [entry["token"] for entry in streamed["content"]] == [e["token"] for e in content]


def test_a_prompt_is_scored_without_a_completion(client: FlaskClient) -> None:
    prompts = ["If the file is closed", "Re"]
    body = ASK | {"prompt": prompts, "max_tokens": 0, "echo": True, "n": 2, "logprobs": 1}
    expected = ask(client, **body)
    assert expected["usage"]["completion_tokens"] == 0
    assert expected["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [choice["text"] for choice in expected["choices"]] == [p for p in prompts for _ in "12"]
    chunks = ask(client, **body, stream=True)
    assert {chunk["choices"][0]["text"] for chunk in chunks} == {*prompts}


FULL: list[tuple[str, dict[str, Any]]] = [
    ("dynamic", {"max_model_len": 1024}),  # of the model itself
    ("dynamic", {"max_model_len": 63, "prefix_caching": True, "token_budget": 10}),
    ("dynamic", {"kernels": "plain", "ahead": True}),
    ("dynamic", {"generator": "padded"}),
    ("dynamic", {"generator": "naive"}),
    ("dynamic", {"kv_reservation": "demand", "speculate": 3}),
    ("dynamic", {"order": "srpt", "kv_reservation": "demand"}),
    ("static", {}),
    ("windowed", {}),
    ("nobatch", {}),
]


@pytest.mark.parametrize(("mode", "settings"), FULL, ids=str)
def test_a_full_prompt_is_scored(mode: str, settings: dict[str, Any], client_of: ClientOf) -> None:
    """A place in the context was asked for the token that is computed and not shown; and a KV slot,
    for which the smallest pool had no block.
    """
    settings = {"model": "demo", "max_model_len": 64, **settings}
    most = settings["max_model_len"]
    client = client_of(mode, kv_cache=f"{-(-most // 16)}blocks", **settings)
    prompt = [i * i % 256 for i in range(most)]
    score: dict[str, Any] = {"echo": True, "logprobs": 0}
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt[:-1], "max_tokens": 1},
        {"prompt": prompt, "max_tokens": 0},
    ]
    before, full = (ask(client, **body, **score)["choices"][0]["logprobs"] for body in bodies)
    expected = pytest.approx(before["token_logprobs"][1:-1], abs=1e-4)
    assert full["token_logprobs"][1:-1] == expected and len(full["tokens"]) == most
    for body in ({"stream": True}, {"logprobs": None}, {"n": 2} if mode == "dynamic" else {}):
        ask(client, **bodies[1] | score | body)
    for beyond in ({"prompt": prompt, "max_tokens": 1}, {"prompt": [*prompt, 1], "max_tokens": 0}):
        assert client.post("/v1/completions", json=beyond | score).status_code == 400


def test_stop_ids_end_a_text_before_them_and_min_tokens_delays_that(client: FlaskClient) -> None:
    greedy: dict[str, Any] = {"prompt": "If the file", "max_tokens": 24, "temperature": 0}
    text = ask(client, **greedy)["choices"][0]["text"]
    at = text.index("a")
    [ended] = ask(client, **greedy, stop_token_ids=[ord("a")])["choices"]
    assert ended["text"] == text[:at] and ended["finish_reason"] == "stop"
    body = greedy | {"stop_token_ids": [ord("a")], "min_tokens": at + 3}
    later = ask(client, **body)
    assert later["usage"]["completion_tokens"] > at + 3
    assert "a" not in later["choices"][0]["text"][: at + 3]
    # a string that is whole within min_tokens ends nothing, and is shown
    put_off = greedy | {"stop": text[at - 1 : at + 1], "min_tokens": at + 1}
    assert ask(client, **greedy | {"stop": put_off["stop"]})["choices"][0]["text"] == text[: at - 1]
    for stream in (False, True):
        result = ask(client, **put_off, stream=stream)
        parts = [chunk["choices"][0] for chunk in (result if stream else [result])]
        shown = "".join(part["text"] for part in parts)
        assert text.startswith(shown) and len(shown) > at
