"""Trace files of every form: what is read, shared, scaled, left out and refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from client.draws import WorkloadError
from client.formats import about_tokens
from client.groups import describe, described
from client.progress import Progress
from client.trace_file import Context, TraceFile
from client.traces import Request, load_trace, save_trace
from compare import options as compared
from compare.measuring import GivenTraces, Measuring
from simulate import program as simulated
from simulate.comparing import Simulated
from tests.client.test_workloads import ids_of


@pytest.fixture
def trace_of(tmp_path: Path) -> Callable[..., list[Request]]:
    """Reads a file of this text, or of these JSON lines, as its flags say."""

    def read(content: Any, context: Context | None = None, **flags: Any) -> list[Request]:
        if not isinstance(content, str | bytes):
            content = "\n".join(map(json.dumps, content))
        if isinstance(content, str):
            content = content.encode()
        (tmp_path / "trace").write_bytes(content)
        return [*TraceFile(tmp_path / "trace", **flags).requests(context)[0]]

    return read


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_3 = BURSTGPT.replace("Model", "Session ID,Elapsed time,Model")
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
USER, ANSWER = {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
SHAREGPT = [
    {"id": "a", "conversations": [
        {"from": "gpt", "value": "the end of another"}, {"from": "human", "value": "a"},
        {"from": "gpt", "value": "An answer."}, {"from": "human", "value": "b"},
        {"from": "gpt", "value": "More"}, {"from": "human", "value": ""},
        {"from": "gpt", "value": "to nothing"}, {"from": "human", "value": "unanswered"},
    ]},
    {"id": "a", "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
]  # fmt: skip
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:ab12\nsize 27901454\n"
OURS = '{"id": 4, "at": 2, "prompt": "a", "num_tokens": 3}'
LINES, BURST = {"lengths": "fixed:7"}, {"arrival": "burst"}
# {form: (file, flags, of each request: at, prompt or its tokens, completion tokens, turn it follows
# and the pause before it)}
FORMS: dict[str, tuple[Any, dict[str, Any], list[tuple[Any, ...]]]] = {
    "Azure 2023, with a mark and CRLF, a row too late": (
        f"\ufeff{AZURE}\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n", {},
        [(0.0, 374, 44), (4.314579, 396, 109)],
    ),
    "Azure 2024, some times with an offset, without a token": (
        f"{AZURE}\n2024-05-10 00:00:00.009930+00:00,9,2\n2024-05-10 00:00:01,0,2\n"
        "2024-05-10 00:00:02+00:00,9,2\n", {}, [(0.0, 9, 2), (1.99007, 9, 2)],
    ),
    "BurstGPT 1, with a failure": (
        f"{BURSTGPT}\n5,ChatGPT,472,18,490,Conversation log\n7,GPT-4,9,0,9,API log\n"
        "45.5,GPT-4,9,3,12,API log\n", {}, [(0.0, 472, 18), (40.5, 9, 3)],
    ),
    "BurstGPT 3: 7.5 s after the answer before it": (
        f"{BURSTGPT_3}\n5,x,2.5,ChatGPT,47,18,65,Conversation log\n6,,1,GPT-4,30,5,35,API log\n"
        "15,x,3,ChatGPT,87,23,110,Conversation log\n", {},
        [(0.0, 47, 18), (0.0, 87, 23, 0, 7.5), (1.0, 30, 5)],
    ),
    "Vidur, ids twice, turns in another order": (
        f"request_id,{VIDUR},session_id,session_turn_index\n0,0,5,2,9,1\n0,0,4,2,9,0\n1,3,6,2,8,0",
        {}, [(0.0, 4, 2), (0.0, 5, 2, 0, 0.0), (3.0, 6, 2)],
    ),
    "µs by its header": (
        VIDUR.replace("at", "at_us") + "\n5000000,4,2\n6500000,4,2", {}, [(0.0, 4, 2), (1.5, 4, 2)],
    ),
    "ms by --time-unit": (
        f"{VIDUR}\n500,4,2\n2000,4,2", {"time_unit": "ms"}, [(0.0, 4, 2), (1.5, 4, 2)],
    ),
    "packed by gzip": (gzip.compress(f"{VIDUR}\n0,4,2\n".encode()), {}, [(0.0, 4, 2)]),
    "Mooncake": (
        [{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]},
         {"timestamp": 30535, "input_length": 3, "output_length": 1, "hash_ids": [2]}], {},
        [(0.0, 600, 52), (3.053, 3, 1)],
    ),
    "aiperf: a turn's length is its own": (
        [{"session_id": "a", "timestamp": 5, "input_length": 9, "output_length": 5},
         {"session_id": "b", "timestamp": 7, "text_input": "hi", "output_length": 4},
         {"session_id": "a", "delay": 2000, "input_length": 3, "output_length": 2}], {},
        [(0.0, 9, 5), (0.0, 17, 2, 0, 2.0), (0.002, "hi", 4)],
    ),
    "aiperf's messages, whole in each turn": (
        [{"session_id": "a", "timestamp": 0, "messages": [USER], "output_length": 5},
         {"session_id": "a", "timestamp": 2000, "messages": [USER, ANSWER, USER],
          "output_length": 3}],
        {}, [(0.0, "b", 5), (0.0, "\nb", 3, 0, 2.0)],
    ),
    "Bailian: seconds, blocks of 16, and turns whole": (
        [{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1, "input_length": 20,
          "output_length": 2, "type": "text", "turn": 1, "hash_ids": [0, 1]},
         {"chat_id": 2, "parent_chat_id": 1, "timestamp": 1.5, "input_length": 40,
          "output_length": 2, "type": "text", "turn": 2, "hash_ids": [0, 2, 3]}], {},
        [(0.0, 20, 2), (0.5, 40, 2)],
    ),
    "ShareGPT: an answer's words and signs, no time": (
        json.dumps(SHAREGPT), BURST,
        [(0.0, "a", 3), (0.0, "\nb", 1, 0, 0.0), (0.0, "c", 1)],
    ),
    "a prompt a line": (
        "\ufeffone\r\n\r\ntwo, three\r\n", LINES | BURST,
        [(0.0, "one", 7), (0.0, "two, three", 7)],
    ),
    "ours": (f"{OURS}\n\n", {}, [(2.0, "a", 3)]),
    "the first one, with other lengths": (
        f"{VIDUR}\n0,4,2\n1,5,2", LINES | {"most": 1}, [(0.0, 4, 7)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_is_known_by_its_content(form: str, trace_of: Callable[..., Any]) -> None:
    content, flags, expected = FORMS[form]
    read = trace_of(content, **flags)
    turn = [() if r.after is None else (r.after, r.think_s) for r in read]
    lengths = [r.prompt if r.prompt is not None else len(r.prompt_ids) for r in read]
    assert [(r.at, n, r.num_tokens, *t) for r, n, t in zip(read, lengths, turn)] == expected


def test_prompts_are_shared_as_in_what_was_recorded(
    trace_of: Callable[..., Any], tmp_path: Path
) -> None:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    asked = (3000, 1100, 500, [0, 1, 2]), (3000, 1024, 512, [0, 1]), (4500, 700, 1, [0, 9])
    lines = [dict(zip(keys, each)) for each in (*asked, (6000, 3, 1, [9]))]
    whole, scaled = (trace_of(lines, scale=Fraction(scale)) for scale in ("1", "0.03125"))
    assert [len(ids) for ids in ids_of(scaled)] == [35, 32, 22, 1], "⌈tokens / 32⌉"
    assert [r.num_tokens for r in scaled] == [16, 16, 1, 1]
    for block, requests in ((512, whole), (16, scaled)):
        a, b, c, d = ids_of(requests)
        assert a[: 2 * block] == b and a[:block] == c[:block], "equal hash ids, equal prompts"
        assert a[block : 2 * block][:6] != c[block:][:6]
        assert c[block:][: len(d)] == d, "a block is the same wherever it stands"
        assert max(a) < 256
    odd = ids_of(trace_of(lines, scale=Fraction("0.0321")))
    assert odd[0][:33] == odd[1] and odd[0][:17] == odd[2][:17], "blocks of 16 and 17 tokens"

    first, later, other = ids_of(
        talk := trace_of(FORMS["BurstGPT 3: 7.5 s after the answer before it"][0])
    )
    assert later[:47] == first and other[:9] != first[:9]
    save_trace(tmp_path / "ours.jsonl", talk)
    assert load_trace(tmp_path / "ours.jsonl") == talk
    blocks = {"hash_ids": [8], "input_length": 9, "output_length": 5}
    turns = [{"session_id": n, **blocks} for n in "aab"]
    first, later, other = ids_of(trace_of(turns, arrival="burst"))
    assert later[:9] == first == other


def test_what_no_server_takes_is_left_out_with_the_turns_after_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = ("0,,9,2", "1,a,9,2", "2,a,99,2", "3,a,9,2", "4,,9,0", "5,,8,92")
    path.write_text("\n".join(("Timestamp,Session ID,Request tokens,Response tokens", *rows)))
    requests, words = TraceFile(path).requests(Context(100))
    assert [len(ids) for ids in ids_of(requests)] == [9, 9, 8]
    left_out = "3 of 6 requests (1 without tokens, 2 beyond the context of 100)"
    assert words["left_out"] == left_out
    assert described({**describe(requests), **words}).endswith(f"; left out: {left_out}")
    assert len(TraceFile(path, scale=Fraction(1, 2)).requests(Context(100))[0]) == 5
    with pytest.raises(WorkloadError, match=r"1 without tokens, 5 beyond .*--scale-tokens 0.1"):
        TraceFile(path).requests(Context(5))
    talk = [
        {"id": i, "at": 0, "prompt": "one two", "num_tokens": 3}
        | ({"after": i - 1, "think_s": 0} if i else {})
        for i in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, talk)))
    requests, _ = TraceFile(path).requests(Context(10, lambda text: len(text.split())))
    assert len(requests) == 2, "of text, each turn holds all before it"


@pytest.mark.parametrize("kind", ["compare", "simulate"])
def test_a_comparison_leaves_out_what_its_smallest_context_cannot_hold(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("word " * 45 + "\nword\n")
    given = f"--trace {path} --lengths fixed:9 --arrival burst --out {tmp_path}"
    argv = [*given.split(), "--variant", "a=dynamic", "--variant", "b=dynamic --max-model-len 50"]
    parse: Callable[[list[str]], compared.Options] = simulated.parse
    if kind == "compare":
        parse, argv = compared.parse, [*argv, "--model", "fake", "--tokenizer", "bytes"]
    traces = GivenTraces(parse(argv))
    assert len(traces.requests(0)) == 1
    assert traces.words["left_out"] == "1 of 2 requests (1 beyond the context of 50)"


@pytest.mark.parametrize(("text", "tokens"), [
    ("今天天气很好" * 40, 240), ("きょうはとても" * 40, 280), ("한국어 " * 40, 120), ("、。", 2),
    ("0123456789abcdef" * 20, 80), ("Hello there, you two!", 6), ("internationalization", 5),
])  # fmt: skip
def test_texts_of_any_script_have_about_as_many_tokens_as_without_spaces(
    text: str, tokens: int, trace_of: Callable[..., Any]
) -> None:
    """272 Chinese characters were one token, and 320 hexadecimal digits, too."""
    assert about_tokens(text) == tokens
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": text}]
    talk = json.dumps([{"conversations": said}])
    [request] = trace_of(talk, **BURST)
    assert request.num_tokens == tokens
    [request] = trace_of(talk, Context(9000, lambda text: len(text.encode())), **BURST)
    assert request.num_tokens == len(text.encode()), "where a tokenizer is known, it counts answers"


def test_advice_for_texts_that_are_too_long_is_not_refused(trace_of: Callable[..., Any]) -> None:
    with pytest.raises(WorkloadError, match=r"1 beyond .* a larger --max-model-len, or the trace"):
        trace_of("今天" * 50, Context(100), **LINES, **BURST)


def test_texts_cannot_be_counted_without_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiktoken.get_encoding", mock.Mock(side_effect=OSError))
    compared._encoder.cache_clear()
    with pytest.raises(WorkloadError, match="could not be fetched"):
        compared.most_tokens(("bytes", "r50k_base"), "a text")


@pytest.mark.parametrize(("content", "flags", "sentence"), [
    ("nonsense", {}, "line 1: it is no trace: a table begins with "),
    ("one", LINES, "it does not say when to send; add --arrival"),
    (json.dumps(SHAREGPT), {}, "it does not say when to send; add --arrival"),
    (json.dumps(SHAREGPT), {"scale": Fraction(1, 2)} | BURST, "leave out --scale-tokens"),
    (json.dumps(SHAREGPT), {"time_unit": "ms"}, "leave out --time-unit"),
    ('[{"conversations": 5}]', {}, "it is not .*conversations"),
    (OURS, {"scale": Fraction(2)}, "leave out --scale-tokens"),
    (f"{AZURE}\n", {}, "holds no requests$"),
    (f"{AZURE}\n0,9,0", {}, r"can be served: 1 without tokens; give requests with a token"),
    (f"{AZURE}\n16 May,9,4", {}, "line 2: TIMESTAMP: '16 May' is not a time"),
    (f"{AZURE}\n1,9,4.5", {}, "line 2: GeneratedTokens: '4.5' is not a whole number"),
    (f"{VIDUR}\n0,9,4\n1700000000000,9,4", {}, "name their unit, --time-unit ms or us"),
    ([{"text_input": "a"}], BURST, "1 of 1 requests have no completion lengths; add"),
    (f"{VIDUR}\n1,2,3\n1,2", {}, "line 3: 2 values for 3 columns; give one for each"),
    (f"{VIDUR}\n1,1,024,4", LINES, "line 2: 4 values for 3 columns; give one for each"),
    (f"{VIDUR}\n1,2,3\n1,2,", {}, "1 of 2 requests have no completion lengths; add --lengths, "
     "such as fixed:100, or mend line 3$"),
    (f"{VIDUR}\n1,2,3\n,2,4", {}, "such as poisson:2, or mend line 3$"),
    (f"{VIDUR},arrived_at\n0,9,4,1", {}, "line 2: 4 values for 3 columns; give one for each"),
    (f"{VIDUR},timestamp\n0,9,4,17000", {}, "line 2: arrived_at and timestamp mean the same"),
    ([{"timestamp": 5, "arrived_at": 5, "input_length": 9, "output_length": 1}], {},
     "line 1: timestamp and arrived_at mean the same"),
    (f"{VIDUR}\n0,9,4\n".encode("utf-16"), {}, "save it as UTF-8"),
    (LFS, LINES, "it is Git LFS's pointer to a file; fetch the file with git lfs pull"),
    (gzip.compress(VIDUR.encode(), mtime=0)[:-4], LINES, "it cannot be read to its end .*; pack"),
    ([{"text_input": "a", "output_length": 1}, 5], BURST, "line 2: give a JSON object"),
    ([{"timestamp": -1, "input_length": 9, "output_length": 1}], {}, "line 1: timestamp: -1 is no"),
    ([{"input_length": 600, "output_length": 5, "hash_ids": [0, 1, 2]}], {},
     "line 1: 3 hash_ids for 600 tokens; .* would be 2"),
    ([{"input_length": 9, "output_length": 5, "hash_ids": [-1]}], {}, "line 1: hash_ids: "),
    ([{"messages": [{"role": "user"}], "output_length": 5}], {}, "line 1: messages: "),
])  # fmt: skip
def test_a_trace_of_another_form_is_refused_in_a_sentence(
    content: Any, flags: dict[str, Any], sentence: str, trace_of: Callable[..., Any]
) -> None:
    with pytest.raises(WorkloadError, match=f"trace.*{sentence}"):
        trace_of(content, **flags)


def test_in_virtual_time_too_a_later_turn_of_ids_is_its_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(FORMS["BurstGPT 3: 7.5 s after the answer before it"][0])
    argv = f"--trace {path} --modes dynamic --prefix-caching --block-size 8 --out {tmp_path}"
    options = simulated.parse(argv.split())
    measuring = Measuring(options, Progress(Console(quiet=True)), Simulated(options))
    result = measuring.measured(0, "dynamic").result
    assert result is not None
    sizes = [(each["prompt_tokens"], each["completion_tokens"]) for each in result.requests]
    assert sizes == [(47, 18), (87, 23), (30, 5)]
    assert result.server["cached_tokens"] == 40, "five whole blocks of the first turn's prompt"
