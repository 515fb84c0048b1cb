"""Runs on disk: a folder with the trace, NAME.json of each server, and summary.json; of several seeds, a folder each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client import calibrate
from client.analysis import identical_outputs
from client.data import Request, describe, dumps
from client.machine import commit, hardware
from client.measure import HEADLINES, part
from config import MODES, ONLY_IN, meaningful
from stats import DEFINITIONS


class RunError(Exception):
    """A folder that holds no run, or one that cannot be read; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Run:
    """A saved comparison: of each seed its summary, and each server's NAME.json."""

    folder: Path
    summaries: list[dict[str, Any]]
    results: list[dict[str, dict[str, Any]]]
    left_out: list[int]  # seeds that were interrupted, where others are whole

    @property
    def first(self) -> dict[str, Any]:
        return self.summaries[0]

    @property
    def partial(self) -> bool:
        return bool(self.left_out) or any(summary["partial"] for summary in self.summaries)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for summary in self.summaries for name in summary["modes"]))

    @property
    def modes(self) -> dict[str, list[dict[str, Any]]]:
        """Each server's headlines, one a seed."""
        return {name: [s["modes"][name] for s in self.summaries if name in s["modes"]] for name in self.names}

    @property
    def points(self) -> dict[str, list[list[dict[str, Any]]]]:
        """Each server's points of a sweep, a list a seed; empty without a sweep."""
        sweeps = [summary["sweep"] for summary in self.summaries if summary.get("sweep")]
        return {name: [s[name] for s in sweeps if name in s] for name in self.names if any(name in s for s in sweeps)}

    def answered(self, name: str) -> list[dict[str, Any]]:
        """The answered requests of a server, of all seeds."""
        return [r for result in self.results if name in result for r in result[name]["requests"] if "text" in r]


def load(folder: Path) -> Run:
    """Read a run from its folder, or from the folders of its seeds. Raises RunError.

    Of several seeds one that was interrupted is left out: what it has would weigh as much as a whole one.
    """
    folders = sorted(folder.glob("seed-*"), key=lambda path: int(path.name[5:]) if path.name[5:].isdigit() else 0) or [folder]
    try:
        summaries = {
            path: json.loads((path / "summary.json").read_text()) for path in folders if (path / "summary.json").exists()
        }
        if not summaries:
            raise RunError(f"{folder} holds no run (no summary.json); give the folder that compare.sh wrote")
        whole = {path: summary for path, summary in summaries.items() if not summary["partial"]} or summaries
        left_out = [summary["seed"] for path, summary in summaries.items() if path not in whole]
        results = [
            {name: json.loads((path / f"{name}.json").read_text()) for name in summary["modes"]}
            for path, summary in whole.items()
        ]
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read the run in {folder}: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{folder} was written by another version of compare.sh; measure it again") from None
    return Run(folder, list(whole.values()), results, left_out)


def facts() -> dict[str, Any]:
    """What is known of a run before it: its machine and its code."""
    return {"hardware": hardware(), "calibration": calibrate.known(), "commit": commit()}


def save(
    folder: Path, requests: Sequence[Request], results: Mapping[str, Mapping[str, Any]], workload: Mapping[str, Any],
    facts: Mapping[str, Any], **more: Any,
) -> None:  # fmt: skip
    """Write what one seed measured, summary.json and each NAME.json, beside its trace."""
    for name, result in results.items():
        (folder / f"{name}.json").write_text(dumps(result))
    summary = {
        "modes": {name: part(result, HEADLINES) for name, result in results.items()},
        "identical_outputs": identical_outputs({name: result for name, result in results.items() if name in MODES}),
        "config": _config(results),
        "workload": describe(requests) | dict(workload),
        "partial": any(result["partial"] for result in results.values()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "definitions": DEFINITIONS,
        **facts, **more,
    }  # fmt: skip
    (folder / "summary.json").write_text(dumps(summary))


def _config(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of all modes; one that belongs to some modes alone, from one of them."""
    configs = {name: result["config"] for name, result in results.items() if result.get("config")}
    config = {}
    for name, value in next(iter(configs.values()), {}).items():
        owners = [mode for mode in configs if meaningful(name, mode)]
        if owners and name not in ("mode", "port", "host", "log_level"):
            config[name] = configs[owners[0]][name] if name in ONLY_IN else value
    return config
