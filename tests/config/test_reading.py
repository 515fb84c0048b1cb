"""Odd files: each reader reads them, or says in one sentence what is wrong and what to do."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from client import runs
from client.draws import WorkloadError
from client.machine import send_limit
from client.trace_file import Context, TraceFile
from client.traces import Request, load_trace, save_trace
from client.users import missing
from compare import foreign
from config.reading import MOST, PoolSize, parse, read_keys, read_size
from config.shapes import shape_of
from simulate.costs import CostsError
from simulate.costs import load as load_costs
from simulate.replay import ReplayError, replay_file
from simulate.vllm.history import history
from tests.counts import examples
from tests.server.observers.test_recordings import recorded
from tests.servers import ROOT

RESULTS = ROOT / "results"
TOOLS = RESULTS / "load_generators"
SEPARATORS = "\u2028\u2029\x85\x1c\x1d\x1e\x0b\x0c"  # where str.splitlines() splits, too
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(SEPARATORS), min_size=1)
TRACE = {"id": 0, "at": 0.5, "prompt": "a", "num_tokens": 2, "seed": 1, "user": "b", "priority": 1}
MOONCAKE = {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
AIPERF = [
    {"session_id": "a", "timestamp": 5, "input_length": 9, "output_length": 5, "hash_ids": [4]},
    {"session_id": "a", "delay": 5, "input_length": 9, "output_length": 5},
    {"session_id": "b", "messages": [{"role": "user", "content": "a"}], "output_length": 5},
]
TALK = [{"from": "human", "value": f"a{SEPARATORS}b"}, {"from": "gpt", "value": "b"}]
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,2.5,ChatGPT,47,18,65,Conversation log\n9,a,2.5,ChatGPT,97,18,115,Conversation log"
)
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "layer_norm_epsilon": 1e-5}


def sent(path: Path, scale: Fraction = Fraction(1)) -> list[Request]:
    """All requests of a trace in any form, with their prompts."""
    arrival = None if path.suffix == ".csv" else "burst"
    return [*TraceFile(path, arrival, scale=scale).requests(Context(9000))[0]]


def scaled(path: Path) -> list[Request]:
    return sent(path, Fraction(1, 32))


def cache_of(path: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path.parent.parent))
        return send_limit()


# {name of a file: (what reads it, the error of a user's, a good text)}; separators break no line
READERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "trace.jsonl": (load_trace, WorkloadError, json.dumps(TRACE)),
    "mooncake.jsonl": (scaled, WorkloadError, json.dumps(MOONCAKE)),
    "aiperf.jsonl": (sent, WorkloadError, "\n".join(map(json.dumps, AIPERF))),
    "sharegpt.json": (sent, WorkloadError, json.dumps([{"conversations": TALK}])),
    "burstgpt.csv": (sent, WorkloadError, BURSTGPT),
    "azure.csv": (
        sent, WorkloadError,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,9,4",
    ),
    "costs.json": (load_costs, CostsError, (RESULTS / "costs" / "gpt2.json").read_text()),
    "calls.jsonl": (lambda path: replay_file(str(path)), ReplayError, "\n".join(recorded())),
    "vllm.jsonl": (
        history, runs.RunError,
        "\n".join((RESULTS / "live" / "vllm.jsonl").read_text().splitlines()[:9])
        .replace("gpt2", SEPARATORS[:3], 1),
    ),
    "benchmarks.json": (
        foreign.read, runs.RunError, (TOOLS / "guidellm" / "benchmarks.json").read_text(),
    ),
    "profile_export_aiperf.json": (
        foreign.read, runs.RunError, (TOOLS / "aiperf" / "profile_export_aiperf.json").read_text(),
    ),
    "vllm.json": (foreign.read, runs.RunError, (TOOLS / "vllm" / "vllm.json").read_text()),
    "summary.json": (
        lambda path: runs.load(path.parent, requests=False), runs.RunError,
        (TOOLS / "client" / "summary.json").read_text(),
    ),
    "config.json": (lambda path: shape_of(str(path.parent)), ValueError, json.dumps(SIZES)),
    "keys.txt": (
        lambda path: read_keys(str(path)), ValueError,
        f"ann 0123456789abcdef\n# a comment{SEPARATORS}of two words\n",
    ),
    "client.json": (cache_of, AssertionError, "{}"),
}  # fmt: skip
DEEP = "[" * 100_000
ODD_TEXTS = (
    "", "\n", "nonsense", "[1]", "5", '"x"', "null", "{}", DEEP, '{"a": ' + DEEP, "9" * 400,
    '{"a": ' + "9" * 5000 + "}", '{"at": 1e400}', '{"timestamp": ' + "9" * 400 + "}",
)  # fmt: skip
ODD_BYTES = (b"\xff\xfe\xfa", b"\x00", b'{"a": "\xff"}', b"\x1f\x8b\x08broken")
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, "abc", "", [], {}, [[]], 10**30, -(10**30), 10**250, 1.7e15, 1e300,
    -1e300, float("nan"), float("inf"),
)  # fmt: skip


def read(name: str, content: bytes, folder: Path) -> str | None:
    """Read a file of this content; return the sentence with which it is refused."""
    reader, error, _ = READERS[name]
    path = folder / "effective-batching" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        reader(path)
    except error as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_deep_huge_or_no_text_is_refused(name: str, tmp_path: Path) -> None:
    """`[[[[…` ended in RecursionError, numbers of 400 digits in OverflowError or ValueError."""
    assert read(name, READERS[name][2].encode(), tmp_path) is None, "the good file is read"
    for content in (*(text.encode() for text in ODD_TEXTS), *ODD_BYTES):
        refused = read(name, content, tmp_path)
        assert refused is None or (len(refused) > 20 and "\n" not in refused.strip()), refused
    for text, why in (DEEP, "nested too deeply"), ("1e400", "too large"), ("9" * 400, "too large"):
        with pytest.raises(ValueError, match=why):
            parse(text)


@pytest.mark.parametrize("name", [n for n in READERS if n not in ("calls.jsonl", "client.json")])
def test_every_reader_unpacks_gzip_and_names_a_pointer_of_git_lfs(
    name: str, tmp_path: Path
) -> None:
    """Recordings of vLLM alone were unpacked, and a trace's pointer was "no trace"."""
    assert read(name, gzip.compress(READERS[name][2].encode()), tmp_path) is None
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab12\nsize 27901454\n"
    assert "fetch the file with git lfs pull" in str(read(name, pointer, tmp_path))


@examples(300)
@given(share=st.floats(0, 1, exclude_min=True), most=st.sampled_from([*MOST.values()]))
def test_a_size_that_is_read_is_printed_as_one_that_is_read(share: float, most: PoolSize) -> None:
    """`0.00001GB` was printed as 1e-05GB, and numbers beyond a float as inf: neither was a size."""
    amount = share * most.amount
    text = f"{max(1, round(amount)) if most.unit == 'blocks' else amount}{most.unit}"
    printed = str(read_size(text))
    assert str(read_size(printed)) == printed
    assert read_size(printed).amount == pytest.approx(read_size(text).amount, rel=1e-14)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in JSON."""
    yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def cells(row: Any) -> str:
    return ",".join(map(str, row)) if isinstance(row, list) else str(row)


def changed(value: Any, at: Sequence[Any], to: Any) -> Any:
    """Return JSON with another value at a place."""
    if not at:
        return to
    result = copy.copy(value)
    result[at[0]] = changed(result[at[0]], at[1:], to)
    return result


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [each for each in READERS if each != "keys.txt"])
@examples(500)
@given(data=st.data())
def test_one_odd_value_anywhere_is_read_or_refused_in_a_sentence(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good, lines, table = READERS[name][2], name.endswith(".jsonl"), name.endswith(".csv")
    texts = good.split("\n") if lines or table else [good]
    values = [each.split(",") if table else json.loads(each) for each in texts]
    i = data.draw(st.integers(0, len(values) - 1))
    at = data.draw(st.sampled_from([*places(values[i])]))
    values[i] = changed(values[i], at, data.draw(st.sampled_from(ODD_VALUES)))
    text = cells if table else json.dumps
    content = "\n".join(map(text, values)).encode()
    read(name, content, tmp_path_factory.getbasetemp())


@examples(300)
@example(prompts=[SEPARATORS], user=SEPARATORS)
@example(prompts=["NaN"], user="NaNs")
@given(  # names that pandas takes for missing values are refused
    prompts=st.lists(TEXTS, min_size=1, max_size=4),
    user=TEXTS.filter(lambda name: not missing(name)),
)
def test_a_saved_trace_is_the_same_again_whatever_its_texts_are(
    prompts: list[str], user: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """U+2028, U+2029 and U+0085 in a prompt broke the line for `--trace`, which refused it."""
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    requests = [
        Request(id=i, at=i, prompt=prompt, num_tokens=1, user=user)
        for i, prompt in enumerate(prompts)
    ]
    save_trace(path, requests)
    assert load_trace(path) == requests


def test_separators_of_unicode_break_no_line_of_aiperfs(tmp_path: Path) -> None:
    for file in (TOOLS / "aiperf").glob("profile*"):
        text = file.read_text().replace('"unit": "ms"', f'"unit": "m{SEPARATORS[:3]}s"')
        (tmp_path / file.name).write_text(text)
    assert foreign.read(tmp_path / "profile_export_aiperf.json").requests
