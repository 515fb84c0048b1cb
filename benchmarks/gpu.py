"""All that is claimed of a GPU, measured in one command of at most nine minutes: benchmarks/gpu.sh.

    python -m benchmarks.gpu [--out FOLDER] [any server setting]

The default is gpt2-medium with random weights, without a download. Each part is a command of its
own, whose output is kept in FOLDER; one that fails or runs out of time leaves the others. Ends with
exit code 1 unless all of them ran. `--device cpu` runs the same on a CPU, which is how it is
tested.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import agreement, burst, engine, huggingface
from benchmarks.common import configs, run
from benchmarks.engine import BESIDE
from client.calls import ServerError
from client.machine import command_line, processor, stamp
from compare.servers import as_flag, server
from config import ONLY_OVER_HTTP, Config, ConfigError, Parser
from config.resolve import VOCABULARIES

MINUTES = 8.5
STOP_S = 30  # for the last part to stop in
DEFAULTS = {"model": "gpt2-medium", "weights": "random", "tokenizer": "bytes", "device": "cuda"}


UNUSED = {
    "agreement": agreement.UNUSED,
    "steps": engine.UNUSED,
    "steps_eager": engine.UNUSED,
    "burst": burst.UNUSED,
    "burst_huggingface": huggingface.UNUSED,
    "comparison": frozenset[str](),
}


def commands(
    options: Any, settings: Mapping[str, Any], gpu: bool, out: Path
) -> dict[str, list[str]]:
    """What runs, in order, each with the settings that have an effect there."""
    steps = [
        "benchmarks.engine",
        "--rows",
        options.rows,
        "--contexts",
        options.context,
        "--prompts",
        options.prompts,
    ]
    n = str(options.n)
    parts = {
        "agreement": ["benchmarks.agreement", "--n", str(min(8, options.n))],
        "steps": [*steps, "--out", str(out)],
        "steps_eager": [*steps, "--out", str(out / "eager"), "--enforce-eager"],
        "burst": ["benchmarks.burst", "--n", n],
        "burst_huggingface": ["benchmarks.huggingface", "--n", n],
        "comparison": [
            "compare",
            "--numsamples",
            str(options.numsamples),
            "--skip-calibration",
            "--out",
            str(out / "comparison"),
        ],
    }
    if not gpu:
        del parts["steps_eager"]  # nothing is captured there
    return {
        name: [
            *part,
            *(
                word
                for key, value in settings.items()
                if key not in UNUSED[name]
                for word in as_flag(key, value)
            ),
        ]
        for name, part in parts.items()
    }


def call(command: Sequence[str], log: Path, seconds: float) -> tuple[str | None, list[str]]:
    """Run `python -m …`; return what went wrong, if anything, and its lines, which go to `log`."""
    print(f"\n$ python -m {shlex.join(command)}", flush=True)
    if seconds <= 0:
        return "no time was left", []
    problem = None
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
            problem = (
                f"exit code {process.returncode}: {said.strip()[-300:]}"
                if process.returncode
                else None
            )
        except subprocess.TimeoutExpired:
            problem = "no time was left to finish it"
            process.terminate()  # a comparison then stops its servers and keeps what it has
            try:
                said, _ = process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
    log.write_text(said)
    lines = said.splitlines()
    print(
        "\n".join(line for line in lines if not line.startswith("{"))
        + (f"\n{problem}" if problem else ""),
        flush=True,
    )
    return problem, lines


def startup_s(settings: Mapping[str, Any], seconds: float) -> float:
    """From the launcher's start until the server is ready. Raises ServerError after `seconds`."""
    start = time.perf_counter()
    with server("dynamic", settings, seconds):
        return time.perf_counter() - start


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f}"


def steps_part(steps: Mapping[str, Any], eager: Mapping[str, Any]) -> list[str]:
    """Two tables: steps against their bound, and with a prompt; beside each without graphs."""
    without = {p["rows"]: p["seconds"] for p in eager.get("steps", [])}
    read, multiply = (
        f"{steps['bytes_per_s'] / 1e9:,.0f} GB/s",
        f"{steps['flops_per_s'] / 1e12:,.1f} TFLOP/s",
    )
    text = (
        f"A step of decode rows of context {steps['steps'][0]['context']}, "
        f"with greedy sampling and the wait for the ids. "
        f"The bound is the larger of two times: "
        f"reading weights and live keys and values, at up to {read}, "
        f"and the arithmetic, at up to {multiply}, both measured beside each step; "
        f"medians of each, and of the part of its bound that a step reaches."
    )
    rows = [
        "| rows | step, ms | tok/s | bound, tok/s | of the bound | step without graphs, ms |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for p in steps["steps"]:
        n, seconds, bound = p["rows"], p["seconds"], max(p["memory_s"], p["arithmetic_s"])
        cells = [
            n,
            _ms(seconds),
            f"{n / seconds:,.0f}",
            f"{n / bound:,.0f}",
            f"{100 * p['reached']:.0f}%",
            _ms(without.get(n)),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    without = {p["prompt_tokens"]: p["seconds"] for p in eager.get("with_a_prompt", [])}
    mixed = [
        f"| tokens of a prompt beside {BESIDE} rows | step, ms | step without graphs, ms |",
        "|--:|--:|--:|",
    ]
    for p in steps["with_a_prompt"]:
        mixed.append(
            f"| {p['prompt_tokens']} | {_ms(p['seconds'])} | "
            f"{_ms(without.get(p['prompt_tokens']))} |"
        )
    return [
        text,
        "\n".join(rows),
        "![Step time against the bound](step_time.png)",
        "\n".join(mixed),
    ]


def report(found: Mapping[str, Any], config: Config, problems: Mapping[str, str], out: Path) -> str:
    """gpu.md."""
    hardware = found["hardware"]
    text = [
        f"# {Path(config.model).name}, {config.dtype}, "
        f"on {processor(hardware, config.model_dump())}"
    ]
    if agreement := found.get("agreement"):
        ids, logits = agreement["float32"], agreement["bfloat16"]
        text.append(
            f"Against the oracle (no cache, a request at a time): "
            f"in float32 {ids['equal']} of {ids['requests']} requests have its ids, "
            f"{ids['undecided']} part from it where it was itself undecided by less than rounding; "
            f"bfloat16 logits differ by {logits['largest_difference']:.3f} at most, "
            f"where the largest is {logits['largest_logit']:.1f}."
        )
    if steps := found.get("steps"):
        text += steps_part(steps, found.get("steps_eager", {}))
    if burst := found.get("burst"):
        mine = burst["modes"]["dynamic"]["output_throughput"]
        line = f"The burst of {found['burst_requests']} requests, without HTTP: {mine:,.0f} tok/s"
        if theirs := found.get("burst_huggingface"):
            peer = theirs["output_throughput"]
            line += (
                f", {mine / peer:.1f} times the {peer:,.0f} tok/s "
                f"of Hugging Face's generate() in one static batch"
            )
        text.append(line + ".")
    if seconds := found.get("startup_s"):
        engine = f", {steps['load_s']:.1f} s of them the engine's" if steps else ""
        text.append(f"A server is ready {seconds:.1f} s after its start{engine}.")
    if (comparison := out / "comparison" / "report.md").exists():
        few = (
            f", sampling from {VOCABULARIES[config.tokenizer]} ids"
            if config.tokenizer == "bytes"
            else ""
        )
        text += [
            f"The four modes over HTTP{few} ([report](comparison/report.md)):",
            comparison.read_text().split("\n\n")[1],
        ]
    text += [f"**Missing: {name}** ({reason})" for name, reason in problems.items()]
    text.append(
        f"- {hardware['gpu'] or 'no GPU'}; {hardware['cpu']}, {hardware['cores']} cores; "
        f"torch {hardware['torch']}\n"
        f"- commit {found['commit']}, {found['date']}\n- `{found['command']}`"
    )
    return "\n\n".join(text) + "\n"


def main() -> None:
    deadline = time.monotonic() + 60 * MINUTES
    parser = Parser(
        prog="benchmarks/gpu.sh",
        description="All that is claimed of a GPU, measured.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", default="1,8,32,128,256", help="of a step (default: 1,8,32,128,256)"
    )
    parser.add_argument("--context", default="256", help="tokens of each row (default: 256)")
    parser.add_argument(
        "--prompts",
        default="16,128",
        help=f"tokens of a prompt beside {BESIDE} rows (default: 16,128)",
    )
    parser.add_argument("--n", type=int, default=64, help="requests of the burst (default: 64)")
    parser.add_argument(
        "--numsamples", type=int, default=500, help="requests of the comparison (default: 500)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the results (default: results/gpu/MODEL)"
    )
    defaults = {name: (lambda known, value=value: value) for name, value in DEFAULTS.items()}
    options, [config] = configs(
        parser, sys.argv[1:], lambda known: ["dynamic"], ONLY_OVER_HTTP, **defaults
    )
    settings = DEFAULTS | {
        name: value for name, value in vars(options).items() if name in Config.model_fields
    }
    out = options.out or Path("results/gpu") / config.model_name
    if out.exists() and not (out / "gpu.md").exists():
        raise ConfigError(f"{out} is there and holds no earlier run of this; choose another --out")
    shutil.rmtree(out, ignore_errors=True)  # no part of an earlier run stands under this one's name
    out.mkdir(parents=True)
    found: dict[str, Any] = {
        "command": command_line("benchmarks/gpu.sh", sys.argv[1:]),
        "config": config.model_dump(exclude={*ONLY_OVER_HTTP}),
    }
    found |= stamp() | {"burst_requests": options.n}
    problems: dict[str, str] = {}
    try:
        found["startup_s"] = startup_s(settings, deadline - time.monotonic())
    except ServerError as error:
        problems["start-up"] = str(error)
    for name, command in commands(options, settings, config.device == "cuda", out).items():
        problem, lines = call(command, out / f"{name}.txt", deadline - time.monotonic())
        if problem:
            problems[name] = problem
        if name == "comparison":
            continue
        if said := [line for line in lines if line.startswith("{")]:
            found[name] = json.loads(said[-1])
        elif not problem:
            problems[name] = "it said nothing"
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text(report(found, config, problems, out))
    print(f"\n{(out / 'gpu.md').read_text()}\nwritten to {out}")
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
