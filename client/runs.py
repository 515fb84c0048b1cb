"""Runs on disk: a folder with the trace, NAME.json of each server, and summary.json. Several seeds
have a folder each. NAME.json may be compressed (NAME.json.gz).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client.groups import describe
from client.machine import commit, hardware, save_json, send_limit
from client.results import OF_FILE, OF_SUMMARY, Json, Point, Result
from client.saving import unwritten
from client.traces import Request
from client.users import NAME
from config import reading
from config.settings import ConfigError, has_effect
from stats import DEFINITIONS

FIGURES = {  # {file name without its ending: title}
    "latency_vs_tokens": "Latency against completion tokens, and the fitted line of each variant",
    "by_group": "Mean and p99 of latency by length, and by user and priority where a trace has "
    "them, of each variant",
    "latency_vs_throughput": "Median latency per token against throughput, as the rate rises",
    "ttft_vs_throughput": "99th percentile of the time to first token against throughput, as the "
    "rate rises",
    "goodput": "Goodput against the rate of requests",
    "occupancy": "Rows over time: live, idle, padding, recomputed, empty",
    "rows": "Computed rows by kind",
    "replicas": "Replicas over time",
    "distributions": "Distributions of time to first token, time per output token and end-to-end "
    "latency",
}
# settings that always differ between servers, or have no effect on measures
NOT_SHOWN = ("mode", "port", "host")
LIVE = "live.html"  # the page of its rows, which `python -m simulate.saved_page` makes
REQUESTS = "requests.csv"
OF_SWEEP = "run=*[0-9].json"  # files in a folder of a setting, of vllm bench sweep serve
DRAWN = [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")]
FOUND = ("find.json", "find.md", "find.png", "find.svg")  # by simulate.sh --find
REPORT = ("report.md", "report.html", LIVE, REQUESTS, *DRAWN, *FOUND)


class RunError(Exception):
    """A folder that holds no run, or one that cannot be read; the message names the fix."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A saved comparison.

    summaries: each seed's, with its `variants` as results and its `sweep` as points. results: each
    seed's NAME.json by server; none where they were not read. folders: the seeds' own.
    """

    folder: Path
    summaries: list[Json]
    results: list[dict[str, Result]]
    folders: list[Path]

    @property
    def first(self) -> Json:
        return self.summaries[0]

    @property
    def partial(self) -> bool:
        return bool(self.missing_seeds) or any(summary["partial"] for summary in self.summaries)

    @property
    def missing_seeds(self) -> list[int]:
        """Seeds of the command line that are missing, since they were interrupted."""
        seeds = [summary["seed"] for summary in self.summaries]
        return [seed for seed in self.first["asked"]["seeds"] if seed not in seeds]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for s in self.summaries for name in s["variants"]))

    @property
    def baseline(self) -> str:
        """The server with which the others are compared in pairs."""
        name = self.first.get("baseline")  # client.py has none
        return name if name in self.names else self.names[0]

    @property
    def variants(self) -> dict[str, list[Result]]:
        """Headlines of each server, one result for each seed."""
        return {
            name: [s["variants"][name] for s in self.summaries if name in s["variants"]]
            for name in self.names
        }

    @property
    def points(self) -> dict[str, list[list[Point]]]:
        """Points of each server's sweep, a list for each seed; empty without a sweep."""
        sweeps = [summary["sweep"] for summary in self.summaries if summary.get("sweep")]
        return {
            name: [s[name] for s in sweeps if name in s]
            for name in self.names
            if any(name in s for s in sweeps)
        }

    @property
    def warm_up(self) -> int:
        """Requests of each seed that no measure counts."""
        return (self.first.get("bounds") or {}).get("warm_up", 0)  # older runs have none

    def answered(self, name: str) -> list[Json]:
        """Return the answered requests of a server, of all seeds, without their warm-up."""
        results = [result[name] for result in self.results if name in result]
        requests = (request for result in results for request in result.requests)
        return [each for each in requests if "text" in each and not each.get("warm_up")]


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run of ours."""
    if any(folder.glob(OF_SWEEP)):  # its summary.json is another one
        return False
    return any(folder.glob("seed-*/summary.json")) or (folder / "summary.json").exists()


def load(folder: Path, requests: bool = True) -> SavedRun:
    """Read a run from its folder, or from the folders of its seeds. Raises RunError.

    An interrupted seed is left out if another one is complete: its few requests would weigh as much
    as all of the other's. requests: read each NAME.json, too.
    """
    summaries_of = summaries(folder)
    with _readable(folder):
        whole = {path: s for path, s in summaries_of.items() if not s["partial"]} or summaries_of
    names = {path: list(summary["variants"]) for path, summary in whole.items()}
    if strange := [n for each in names.values() for n in each if not NAME.fullmatch(n)]:
        raise RunError(
            f"{folder} has a server named {strange[0][:100]!r}; rename it to letters, digits "
            f"and -_. alone"
        )
    results = [
        {name: result_of(path, name) for name in each} for path, each in names.items() if requests
    ]
    return SavedRun(folder, list(whole.values()), results, list(whole))


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise RunError where a run cannot be read."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read the run in {folder}: {error}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{folder} was written by another version of compare.sh ({error!r}); measure it again"
        ) from None


def result_of(folder: Path, name: str) -> Result:
    """Read a server's NAME.json from the folder of a seed. Raises RunError."""
    with _readable(folder):
        return Result.of(read_json(folder / f"{name}.json"))


def summaries(folder: Path) -> dict[Path, Json]:
    """Return each seed's summary by its folder, in the order of seeds: its `variants` are results,
    and its `sweep` points. Raises RunError.
    """
    with _readable(folder):
        found = {path.parent: read_json(path) for path in folder.glob("seed-*/summary.json")}
        own = folder / "summary.json"
        if own.exists() and "workload" in (summary := read_json(own)):
            found = {folder: summary}  # a run of one seed, whatever lies beside it
        for summary in found.values():
            summary["variants"] = {n: Result.of(each) for n, each in summary["variants"].items()}
            if sweep := summary.get("sweep"):
                summary["sweep"] = {n: [*map(Point.of, each)] for n, each in sweep.items()}
        ordered = sorted(found.items(), key=lambda item: item[1]["seed"])
    if not found:
        raise RunError(
            f"{folder} holds no run (no summary.json of one); give the folder that compare.sh wrote"
        )
    return dict(ordered)


def read_json(path: Path) -> dict[str, Any]:
    """Read NAME.json, or NAME.json.gz where only that is there. Raises OSError and ValueError."""
    packed = path.with_name(f"{path.name}.gz")
    value = reading.read_json(packed if packed.exists() and not path.exists() else path)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def facts() -> dict[str, Any]:
    """Return the facts of a run that are known before it: machine and code."""
    return {"hardware": hardware(), "calibration": send_limit(), "commit": commit()}


def save(
    folder: Path,
    requests: Sequence[Request],
    results: Mapping[str, Result],
    workload: Json,
    facts: Json,
    new: Collection[str] = (),
) -> None:
    """Write the measurements of one seed, each NAME.json and then summary.json, beside its trace.

    facts: this seed's and those of all, as summary.json has them. new: servers whose NAME.json is
    written over one that is there. Raises Unwritten.
    """
    for name, result in results.items():
        if name in new or not (folder / f"{name}.json").exists():
            save_json(folder / f"{name}.json", result.json(OF_FILE) | {"definitions": DEFINITIONS})
    summary = {
        "variants": {name: result.json(OF_SUMMARY) for name, result in results.items()},
        "config": _config(results),
        "workload": {**describe(requests), **workload},
        "partial": facts["stopped"] is not None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "definitions": DEFINITIONS,
    }
    save_json(folder / "summary.json", {**summary, **facts})


def _configs(results: Mapping[str, Result]) -> dict[str, Json]:
    """Return the settings of each variant of ours that have an effect in it, and are shown."""
    return {
        name: {k: v for k, v in config.items() if k not in NOT_SHOWN and has_effect(k, config)}
        for name, result in results.items()
        if (config := result.config)
    }


def _config(results: Mapping[str, Result]) -> Json:
    """Return the settings of the variants, each as the first variant that uses it has it."""
    configs = _configs(results)
    merged = {k: v for config in reversed(configs.values()) for k, v in config.items()}
    order = results[next(iter(configs))].config if configs else ()
    return {name: merged[name] for name in order if name in merged}


def differing(results: Mapping[str, Result]) -> dict[str, Json]:
    """Return each variant's mode, and its settings with an effect that are not the same in all."""
    configs = _configs(results)
    values: dict[str, set[str]] = {}
    for config in configs.values():
        for name, value in config.items():
            values.setdefault(name, set()).add(str(value))
    return {
        name: {"mode": results[name].config["mode"]}
        | {k: v for k, v in config.items() if len(values[k]) > 1}
        for name, config in configs.items()
    }


def refuse_overwriting(files: Iterable[Path], overwrite: bool) -> None:
    """Raise ConfigError if one of the files is there, unless they are to be overwritten."""
    if not overwrite and (there := next((path for path in files if path.is_file()), None)):
        raise ConfigError(f"{there} is there already; name another, or add --overwrite")


def _folders(out: Path) -> list[Path]:
    """Return the folders of a run, or of an answer of --find, inner ones first."""
    outer = [out / "verified", out] if (out / FOUND[0]).exists() else [out]
    return [folder for each in outer for folder in (*each.glob("seed-*"), each)]


def files(out: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield paths that the files of a run have: an earlier one's in the folder, and of `names`."""
    for folder in _folders(out):
        named = set(names)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            named |= {*filter(NAME.fullmatch, read_json(folder / "summary.json")["variants"])}
        written = [f"{name}.json{packed}" for name in sorted(named) for packed in ("", ".gz")]
        yield from (folder / name for name in ("summary.json", "trace.jsonl", *written, *REPORT))


def clear(out: Path, read: Path | None = None) -> None:
    """Delete files of an earlier run in a folder, and no others. read: a trace that stays, since
    it is not saved again. Raises Unwritten.
    """
    *inner, _ = _folders(out)
    with unwritten(out):
        for file in [*files(out)]:
            if read is None or file.resolve() != read.resolve():
                file.unlink(missing_ok=True)
    for folder in inner:
        with contextlib.suppress(OSError):  # a user's files are in it
            folder.rmdir()
