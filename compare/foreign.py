"""Runs that other load generators measured, read from their JSON.

A number is the tool's own, under our name for what it measures; `Tool.differs` says where the tool
defines it otherwise than `stats.DEFINITIONS`, by its source in the version that is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client.runs import RunError
from config.reading import parse, read_json, read_lines

Json = Mapping[str, Any]
LATENCIES = ("ttft", "tpot", "itl", "e2el", "normalized_latency")  # of which tools have p50 and p99
NUMBERS = (
    "completed", "failed", "wall_clock_s", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput",
)  # fmt: skip
REQUEST = (  # instants in seconds, on the tool's clock
    "sent_at", "first_token_at", "last_token_at", "answered_at", "prompt_tokens",
    "completion_tokens",
)  # fmt: skip
MOST = 1e15  # no number of a run is as large: instants are seconds since 1970
LAST_TOKEN = "ends with the last token, not with the end of the answer"
SERVER, TOKENIZER = "the server", "the tool's tokenizer"
CONNECTED = "starts when the headers are written, so that connecting does not count"
# what a reader finds in a file: settings and hardware in words; numbers by the tool's names, of a
# latency mean, p50 and p99 in ms; the values of REQUEST for each answered one, if they are there
Found = tuple[Mapping[str, str], Json, Iterable[tuple[float, ...]]]


class Tool(NamedTuple):
    """A load generator.

    version: whose source and files were read. read: reader of a file. keys: keys by which its file
    is known. names: {our name: the tool's}, where they differ. differs: {our measure, or
    "percentiles": how its definition departs from ours}.
    """

    name: str
    version: str
    read: Callable[[Path, Json], Found]
    keys: frozenset[str]
    names: Mapping[str, str]
    differs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """A server as one tool measured it.

    tool: None for our own. facts: settings and hardware in words, where they are recorded. results:
    numbers with the keys of our NAME.json, one mapping a seed. requests: the answered ones with the
    keys REQUEST; none where the file has none.
    """

    name: str
    path: Path
    tool: Tool | None
    facts: Mapping[str, str]
    results: Sequence[Json]
    requests: Sequence[Json]


def _guidellm(path: Path, file: Json) -> Found:
    metadata, [run] = file["metadata"], file["benchmarks"]
    if metadata["version"] != 2:
        raise ValueError(f"version {metadata['version']} of its files")
    backend, strategy = run["config"]["backend"], run["config"]["strategy"]
    facts = {
        "tool": f"guidellm {metadata['guidellm_version']}",
        "client": f"{metadata['platform']}, Python {metadata['python_version']}",
        "model": backend["model"],
        "server": backend["target"],
        "answers": "streams" if backend["stream"] else "plain",
        "tokens counted by": SERVER if run["config"]["prefer_response_metrics"] else TOKENIZER,
        "arrival": " ".join(str(strategy[key]) for key in ("type_", "rate") if key in strategy),
    }
    numbers: dict[str, Any] = {
        "duration": run["duration"],
        "completed": run["metrics"]["request_totals"]["successful"],
        "failed": run["metrics"]["request_totals"]["errored"],
    }
    for name in GUIDELLM.names.values():
        if of := run["metrics"].get(name, {}).get("successful"):
            ms = 1e3 if name == "request_latency" else 1
            three = [ms * of["mean"], ms * of["median"], ms * of["percentiles"]["p99"]]
            whole = of["total_sum"] if name.endswith("count") else of["mean"]
            numbers[name] = whole if name.endswith(("count", "per_second")) else three
    instants = ("request_start", "first_token_iteration", "last_token_iteration", "request_end")
    requests = (
        (*map(each["info"]["timings"].get, instants), each["prompt_tokens"], each["output_tokens"])
        for each in run["requests"]["successful"]
    )
    return facts, numbers, requests


def _aiperf(path: Path, file: Json) -> Found:
    if not file["schema_version"].startswith("1."):
        raise ValueError(f"version {file['schema_version']} of its files")
    config, phase = file["input_config"], file["input_config"]["phases"][-1]
    by_server = config["endpoint"].get("use_server_token_count")
    facts = {
        "tool": f"aiperf {file['aiperf_version']}",
        "model": ", ".join(model["name"] for model in config["models"]["items"]),
        "server": ", ".join(config["endpoint"]["urls"]),
        "answers": "streams" if config["endpoint"].get("streaming") else "plain",
        "tokens counted by": SERVER if by_server else TOKENIZER,
        "arrival": " ".join(str(phase[key]) for key in ("type", "rate") if key in phase),
        "date": file["start_time"][:19],
    }
    numbers = {"error_request_count": 0} | {
        name: [of["avg"], of["p50"], of["p99"]] if "p99" in of else of["avg"]
        for name, of in file.items()
        if isinstance(of, dict) and "avg" in of
    }
    records = path.with_name("profile_export.jsonl")
    lines = read_lines(records) if records.exists() else []
    return facts, numbers, filter(None, map(_aiperf_request, map(parse, lines)))


def _aiperf_request(record: Json) -> tuple[float, ...] | None:
    if record.get("error") or record["metadata"]["benchmark_phase"] != "profiling":
        return None
    of = {name: metric["value"] for name, metric in record["metrics"].items()}
    start = record["metadata"]["request_start_ns"] / 1e9
    last = start + of["request_latency"] / 1e3
    tokens = of["input_sequence_length"], of["output_sequence_length"]
    return (start, start + of["time_to_first_token"] / 1e3, last, last, *tokens)


def _vllm(path: Path, file: Json) -> Found:
    arrival = f"{file['request_rate']} requests/s, burstiness {file['burstiness']:g}"
    facts = {
        "tool": VLLM.name,
        "model": file["model_id"],
        "tokens counted by": SERVER,
        "arrival": arrival,
        "date": file["date"],
    }
    latencies = {
        name: [file[f"mean_{name}_ms"], file[f"median_{name}_ms"], file.get(f"p99_{name}_ms")]
        for name in LATENCIES
        if f"mean_{name}_ms" in file
    }
    columns = ("start_times", "ttfts", "latencies", "input_lens", "output_lens", "errors")
    requests = (  # of --save-detailed
        (start, start + ttft, start + e2el, start + e2el, prompt, n)
        for start, ttft, e2el, prompt, n, error in zip(*(file.get(name, ()) for name in columns))
        if not error
    )
    return facts, {**file, **latencies}, requests


GUIDELLM = Tool(
    "guidellm", "0.8.1", _guidellm, frozenset({"metadata", "benchmarks"}),
    {
        "ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms",
        "e2el": "request_latency", "normalized_latency": "time_per_output_token_ms",
        "request_throughput": "requests_per_second",
        "output_throughput": "output_tokens_per_second",
        "total_token_throughput": "tokens_per_second", "wall_clock_s": "duration",
        "total_input_tokens": "prompt_token_count", "total_output_tokens": "output_token_count",
    },
    {
        "ttft": CONNECTED,
        "tpot": "a request counts n − 1 times, so that its mean is over tokens, not requests",
        "e2el": CONNECTED,
        "normalized_latency": "(last token − start) / n, and a request counts n times",
        "percentiles": "the next higher value that occurred; nothing is interpolated",
    },
)  # fmt: skip
AIPERF = Tool(
    "aiperf", "0.13.0", _aiperf, frozenset({"aiperf_version", "request_count"}),
    {
        "ttft": "time_to_first_token", "tpot": "inter_token_latency",
        "itl": "inter_chunk_latency", "e2el": "request_latency",
        "output_throughput": "output_token_throughput", "wall_clock_s": "benchmark_duration",
        "completed": "request_count", "failed": "error_request_count",
        "total_input_tokens": "total_isl", "total_output_tokens": "total_osl",
    },
    {
        "itl": "its percentiles are estimates (t-digest)", "e2el": LAST_TOKEN,
        "wall_clock_s": "ends with the last token of all",
    },
)  # fmt: skip
VLLM = Tool(
    "vllm bench serve", "0.32.0", _vllm,
    frozenset({"endpoint_type", "request_rate", "burstiness"}), {"wall_clock_s": "duration"},
    {
        "e2el": LAST_TOKEN,
        "wall_clock_s": "begins a gap before the first request is sent, unless in a burst",
    },
)  # fmt: skip
TOOLS = (GUIDELLM, AIPERF, VLLM)


def read(path: Path) -> Measured:
    """Read a tool's file, or a folder's only one. Raises RunError, also for another version."""
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    files = {each: _json(each) for each in paths}
    of_tools = [(each, tool) for each in paths for tool in TOOLS if tool.keys <= files[each].keys()]
    if len(of_tools) != 1:
        raise RunError(
            f"{path} holds {'several runs' if of_tools else 'no run'} of tools that are known "
            f"here; give the folder that compare.sh wrote, or one JSON file of "
            f"{', '.join(f'{tool.name} ({tool.version})' for tool in TOOLS)}"
        )
    [(each, tool)] = of_tools
    try:
        facts, own, requests = tool.read(each, files[each])
        result: dict[str, float | None] = {
            name: _number(own[tool.names.get(name, name)]) for name in NUMBERS
        }
        for measure in LATENCIES:
            three = own.get(tool.names.get(measure, measure)) or (None, None, None)
            shown = (each if each is None else _number(each) for each in three)
            result |= {f"{s}_{measure}_ms": v for s, v in zip(("mean", "p50", "p99"), shown)}
        answered = [dict(zip(REQUEST, _request(values))) for values in sorted(requests)]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise RunError(
            f"{each} comes from a version of {tool.name} that is not read here, or has many runs "
            f"({error!r}); measure again with {tool.name} {tool.version}, one run a file"
        ) from None
    return Measured(tool.name, each, tool, facts, [result], answered)


def _number(value: Any) -> float:
    """Return a number. Raises TypeError for all else, and for one that is no measure."""
    if isinstance(value, int | float) and abs(value) < MOST:
        return value
    raise TypeError(f"{value!r} is no number")


def _request(values: Sequence[Any]) -> list[float]:
    """Return the values of REQUEST, NaN for a missing instant. Raises TypeError and ValueError."""
    numbers = [math.nan if each is None else _number(each) for each in values]
    sent, first, last, answered = numbers[:4]
    if first < sent or last < first or answered < sent:
        raise ValueError(f"instants {numbers[:4]} of a request are not in order")
    return numbers


def _json(path: Path) -> Json:
    try:
        file = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    return file if isinstance(file, dict) else {}
