"""Our engine and its peers on the same requests and weights: tokens per second, and their ratio.

A run is ours and then one peer, or the other way round: only neighbours in time compare.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from client.calls import ServerError
from config.settings import ConfigError
from generate.auto import native_bfloat16
from lab.studies.runner import FinishedRuns
from lab.studies.study import Case, Study, Table, grid

ROWS = (64, 1)  # requests: a burst, and its first one alone
OURS, PEERS = "lab.benchmarks.burst --threads 2", "lab.benchmarks.peers.engines"
SPEED = re.compile(r"(.*?),.*?([\d,]+(?:\.\d+)?) tok/s")


def pairs(native: bool) -> list[tuple[str, str]]:
    """Return settings of ours, each with an engine beside it. Where bfloat16 is not native, peers
    run in float32.
    """
    dtype = "bfloat16" if native else "float32"
    floats = [f"--dtype {dtype}", *([] if native else ["--dtype bfloat16"])]
    int8 = f"--dtype {dtype} --linear int8"
    return [
        *itertools.product(floats, (f"vllm --dtype {dtype}", f"openvino --dtype {dtype}")),
        *itertools.product(
            (int8, f"{int8} --kv-dtype int8"), ("ctranslate2 --dtype int8", "openvino --dtype int8")
        ),
    ]


def cases(n: int, models: str, peers: str, vllm: str) -> list[dict[str, Any]]:
    """Return a case for each model, number of rows and pair. Raises ConfigError for no model."""
    for model in models.split(","):
        if not Path(model, "config.json").is_file():
            raise ConfigError(
                f"--models {model!r}: there is no model; make one by python -m "
                "lab.benchmarks.peers.checkpoint"
            )
    cases = grid(model=models.split(","), rows=ROWS, ours=[""], peer=pairs(native_bfloat16()))(n)
    for case in cases:
        case["ours"], case["peer"] = case["peer"]
        case["python"] = vllm if case["peer"].startswith("vllm") else peers
    return cases


def run(case: Case, n: int, seed: int, kept: FinishedRuns) -> dict[str, Any]:
    """Return the tokens per second of both, their ratio, and the peer's version."""
    words = {"ours": f"{OURS} {case['ours']}", "peer": f"{PEERS} {case['peer']}"}
    pythons = {"ours": sys.executable, "peer": case["python"] or sys.executable}
    burst = ["--model", case["model"], "--n", str(case["rows"])]
    found = {
        who: speed([pythons[who], "-m", *words[who].split(), *burst])
        for who in sorted(words, reverse=seed % 2 == 1)
    }
    (_, ours), (version, peer) = found["ours"], found["peer"]
    return {"ours_per_s": ours, "peer_per_s": peer, "ratio": ours / peer, "version": version}


def speed(command: list[str]) -> tuple[str, float]:
    """Run a command that prints "NAME, … 123.4 tok/s"; return both. Raises ServerError."""
    try:
        done = subprocess.run(command, capture_output=True)
    except OSError as error:
        raise ServerError(str(error)) from None
    output = (done.stdout + done.stderr).decode(errors="replace")
    said = SPEED.search(output)
    if done.returncode or not said:
        raise ServerError(
            f"{' '.join(command[1:])} ended with {done.returncode} and printed no tok/s; mend it, "
            f"or leave it out by --only: …{output[-500:]}"
        )
    return said[1], float(said[2].replace(",", ""))


STUDY = Study(
    name="peers",
    title="Ours and its peers",
    question="How much faster or slower is our engine than those of vLLM, OpenVINO GenAI and "
    "CTranslate2 on a CPU?",
    workload="{models}, {seeds} rounds, 2 threads",
    requests=0,
    options={
        "models": ("gpt2", "folders of lab.benchmarks.peers.checkpoint, separated by commas"),
        "peers": ("", "interpreter that has OpenVINO and CTranslate2, if not this one"),
        "vllm": ("", "interpreter that has vLLM, if not this one"),
    },
    cases=cases,
    run=run,
    servers=True,
    measures={
        "ours_per_s": ("ours, tok/s", "{:,.1f}"),
        "peer_per_s": ("peer, tok/s", "{:,.1f}"),
        "ratio": ("ratio", "{:.2f}"),
        "version": ("the peer's version", ""),
    },
    text="Ratio: ours ÷ peer, of two runs one after the other, on the same weights and requests "
    "(`lab/benchmarks/workload.py`: 6,904 completion tokens in 64 requests at once; one row is the "
    "first request alone), greedy, without HTTP. Both are warm before their clocks start.",
    tables=[Table(("model", "rows", "ours", "peer"))],
)
