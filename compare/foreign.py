"""Runs that other load generators measured, read from their JSON.

A number is the tool's own, under our name for what it measures; `Tool.differs` says where the tool
defines it otherwise than `stats.DEFINITIONS`, by its source in the version that is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client.quoting import escape
from client.results import Json, Result
from client.runs import OF_SWEEP, RunError
from config.reading import parse, read_json, read_lines

LATENCIES = ("ttft", "tpot", "itl", "e2el", "normalized_latency")  # tools have their p50 and p99
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
# latency mean, p50 and p99 in ms; a record of each request, if they are there
Found = tuple[Mapping[str, str], Json, Sequence[Any]]
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)


class Tool(NamedTuple):
    """A load generator.

    version: whose source and files were read. read: reader of a file. request: returns a record's
    values of REQUEST, None for one that is missing; nothing for a request that was not answered.
    keys: keys by which its file is known. names: {our name: the tool's}, where they differ.
    differs: {our measure, or "percentiles": how its definition departs from ours}.
    """

    name: str
    version: str
    read: Callable[[Path, Json], Found]
    request: Callable[[Any], Sequence[Any]]
    keys: frozenset[str]
    names: Mapping[str, str]
    differs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """A server as one tool measured it.

    tool: None for our own. facts: settings and hardware in words, where they are recorded. results:
    its numbers, under our names, of each seed. requests: the answered ones, NaN for what is missing
    of REQUEST: those of all seeds of ours, and of the first file of a sweep of vLLM; none where a
    file has none. remarks: in Markdown, why not to trust it.
    """

    name: str
    path: Path
    tool: Tool | None
    facts: Mapping[str, str]
    results: Sequence[Result]
    requests: Sequence[Json]
    remarks: Sequence[str] = ()


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
    return facts, numbers, run["requests"]["successful"]


def _guidellm_request(record: Json) -> Sequence[Any]:
    instants = ("request_start", "first_token_iteration", "last_token_iteration", "request_end")
    tokens = record["prompt_tokens"], record["output_tokens"]
    return *map(record["info"]["timings"].get, instants), *tokens


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
    stem = re.sub("^profile_export_aiperf$", "profile_export", path.name.split(".json")[0])
    records = path.with_name(f"{stem}.jsonl")
    return facts, numbers, read_lines(records) if records.exists() else []


def _aiperf_request(line: str) -> Sequence[Any]:
    record = parse(line)
    if record.get("error") or record["metadata"]["benchmark_phase"] != "profiling":
        return ()
    of = {name: metric["value"] for name, metric in record["metrics"].items()}
    start = record["metadata"]["request_start_ns"] / 1e9
    ends = (of.get(name, math.nan) for name in ("time_to_first_token", "request_latency"))
    first, last = (start + ms / 1e3 for ms in ends)
    tokens = of.get("input_sequence_length"), of.get("output_sequence_length")
    return start, first, last, last, *tokens


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
    detailed = file.keys() >= set(columns)  # by --save-detailed
    records = [*zip(*map(file.get, columns), strict=True)] if detailed else []
    return facts, {**file, **latencies}, records


def _vllm_request(record: Sequence[Any]) -> Sequence[Any]:
    start, ttft, e2el, prompt, n, error = record
    if error or not e2el:  # an error may have no words
        return ()
    return start, start + (ttft or math.nan), start + e2el, start + e2el, prompt, n


GUIDELLM = Tool(
    "guidellm", "0.8.1", _guidellm, _guidellm_request, frozenset({"metadata", "benchmarks"}),
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
    "aiperf", "0.13.0", _aiperf, _aiperf_request,
    frozenset({"aiperf_version", "request_count"}),
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
    "vllm bench serve", "0.32.0", _vllm, _vllm_request,
    frozenset({"endpoint_type", "request_rate", "burstiness"}), {"wall_clock_s": "duration"},
    {
        "e2el": LAST_TOKEN,
        "wall_clock_s": "begins a gap before the first request is sent, unless in a burst",
    },
)  # fmt: skip
TOOLS = (GUIDELLM, AIPERF, VLLM)


def settings(path: Path) -> list[Path]:
    """Return the folders of a sweep of vLLM, one of each setting; else the path itself."""
    folders = {run.parent for run in path.glob(f"*/{OF_SWEEP}")}
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name)) or [path]


def read(path: Path) -> Measured:
    """Read a tool's file, a folder's only one, or the files of a setting of a sweep, which are
    seeds. Raises RunError, also for another version.
    """
    seeds = sorted(path.glob(OF_SWEEP))
    paths = seeds or (sorted(path.glob("*.json")) if path.is_dir() else [path])
    files = {each: _json(each) for each in paths}
    of_tools = [(each, tool) for each in paths for tool in TOOLS if tool.keys <= files[each].keys()]
    if len(of_tools) != 1 and not (of_tools and seeds):
        raise RunError(
            f"{path} holds {'several runs' if of_tools else 'no run'} of tools that are known "
            f"here; give the folder that compare.sh wrote, or one JSON file of "
            f"{', '.join(f'{tool.name} ({tool.version})' for tool in TOOLS)}"
        )
    runs = [_run(tool, each, files[each]) for each, tool in of_tools]
    if not seeds:
        return runs[0]
    return Measured(
        re.sub("(SERVE|BENCH)-+", "", path.resolve().name), path, runs[0].tool, runs[0].facts,
        [run.results[0] for run in runs], runs[0].requests,
        [each for run in runs for each in run.remarks],
    )  # fmt: skip


def _run(tool: Tool, path: Path, file: Json) -> Measured:
    """Return what one file says. Raises RunError."""
    try:
        facts, own, records = tool.read(path, file)
        result: dict[str, float | None] = {
            name: _number(own[tool.names.get(name, name)]) for name in NUMBERS
        }
        for measure in LATENCIES:
            three = own.get(tool.names.get(measure, measure)) or (None, None, None)
            shown = (each if each is None else _number(each) for each in three)
            result |= {f"{s}_{measure}_ms": v for s, v in zip(("mean", "p50", "p99"), shown)}
        answered, left_out = [], 0
        for record in records:
            try:
                if values := tool.request(record):
                    answered.append(dict(zip(REQUEST, _request(values))))
            except UNREADABLE:
                left_out += 1
    except UNREADABLE as error:
        raise RunError(
            f"{path} comes from a version of {tool.name} that is not read here, or has many runs "
            f"({error!r}); measure again with {tool.name} {tool.version}, one run a file"
        ) from None
    remarks = []
    if file.get("was_cancelled") or file.get("is_complete") is False:  # by aiperf
        reason = str(file.get("incomplete_reason") or "cancelled before its end").rstrip(".")
        remarks.append(f"**Partial**: {escape(reason)}.")
    if left_out:
        remarks.append(f"{left_out:,} of {len(records):,} records cannot be read.")
    return Measured(tool.name, path, tool, facts, [Result.of(result)], answered, remarks)


def _number(value: Any) -> float:
    """Return a number. Raises TypeError for all else, and for one that is no measure."""
    if isinstance(value, int | float) and abs(value) < MOST:
        return value
    raise TypeError(f"{value!r} is no number")


def _request(values: Sequence[Any]) -> list[float]:
    """Return the values of REQUEST, NaN for what is missing. Raises TypeError and ValueError."""
    numbers = [math.nan if each is None or each != each else _number(each) for each in values]
    sent, first, last, answered = numbers[:4]
    if not sent <= MOST or first < sent or last < first or answered < sent:
        raise ValueError(f"instants {numbers[:4]} of a request are not in order")
    return numbers


def _json(path: Path) -> Json:
    try:
        file = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    return file if isinstance(file, dict) else {}
