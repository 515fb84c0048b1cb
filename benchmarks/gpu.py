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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import agreement, burst, engine, huggingface
from benchmarks.engine import BESIDE
from benchmarks.harness import Benchmark, chosen_settings, run
from client.calls import ServerError
from compare.machine import command_line, processor, stamp
from compare.report.tables import markdown
from compare.servers import as_flag, server
from config import ONLY_OVER_HTTP, Config, ConfigError
from config.resolve import VOCABULARIES

MINUTES = 8.5
STOP_S = 30  # for the last part to stop in
DEFAULTS = {"model": "gpt2-medium", "weights": "random", "tokenizer": "bytes", "device": "cuda"}
BENCHMARK = Benchmark(
    "gpu",
    "All that is claimed of a GPU, measured (benchmarks/gpu.sh).",
    {
        "--rows": ("1,8,32,128,256", "of a step"),
        "--context": ("256", "tokens of each row"),
        "--prompts": ("16,128", f"tokens of a prompt beside {BESIDE} rows"),
        "--n": (64, "requests of the burst"),
        "--numsamples": (500, "requests of the comparison"),
        "--out": (Path, "folder for the results, results/gpu/MODEL if there is"),
    },
    ONLY_OVER_HTTP,
)


class Part(NamedTuple):
    """A command, with the settings that have no effect on it."""

    words: list[str]
    unused: Collection[str]


def commands(
    options: Any, settings: Mapping[str, Any], gpu: bool, out: Path
) -> dict[str, list[str]]:
    """The commands in order, each with the settings that have an effect there."""
    n = str(options.n)
    steps = ["benchmarks.engine", "--rows", options.rows, "--contexts", options.context]
    steps += ["--prompts", options.prompts]
    modes = ["compare", "--numsamples", str(options.numsamples), "--skip-calibration"]
    parts = {
        "agreement": Part(
            ["benchmarks.agreement", "--n", str(min(8, options.n))], agreement.BENCHMARK.unused
        ),
        "steps": Part([*steps, "--out", str(out)], engine.BENCHMARK.unused),
        "steps_eager": Part(
            [*steps, "--out", str(out / "eager"), "--enforce-eager"], engine.BENCHMARK.unused
        ),
        "burst": Part(["benchmarks.burst", "--n", n], burst.BENCHMARK.unused),
        "burst_huggingface": Part(
            ["benchmarks.huggingface", "--n", n], huggingface.BENCHMARK.unused
        ),
        "comparison": Part([*modes, "--out", str(out / "comparison")], ()),
    }
    if not gpu:
        del parts["steps_eager"]  # nothing is captured there
    return {
        name: [
            *part.words,
            *(
                word
                for key, value in settings.items()
                if key not in part.unused
                for word in as_flag(key, value)
            ),
        ]
        for name, part in parts.items()
    }


def call(command: Sequence[str], log: Path, seconds: float) -> tuple[str | None, list[str]]:
    """Run `python -m …`; return the problem, if any, and its lines, which go to `log`."""
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
            output, _ = process.communicate(timeout=seconds)
            if process.returncode:
                problem = f"exit code {process.returncode}: {output.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            problem = "no time was left to finish it"
            process.terminate()  # a comparison then stops its servers and keeps what it has
            try:
                output, _ = process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
    log.write_text(output)
    lines = output.splitlines()
    shown = [line for line in lines if not line.startswith("{")]
    print("\n".join([*shown, *([problem] if problem else [])]), flush=True)
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
    text = (
        f"A step of decode rows of context {steps['steps'][0]['context']}, "
        f"with greedy sampling and the wait for the ids. "
        f"The bound is the larger of two times: reading weights and live keys and values, "
        f"at up to {steps['bytes_per_s'] / 1e9:,.0f} GB/s, and the arithmetic, "
        f"at up to {steps['flops_per_s'] / 1e12:,.1f} TFLOP/s, both measured beside each step; "
        f"medians of each, and of the part of its bound that a step reaches."
    )
    without = {p["rows"]: p["seconds"] for p in eager.get("steps", [])}
    heading = ["step, ms", "step without graphs, ms"]
    rows = [["rows", heading[0], "tok/s", "bound, tok/s", "of the bound", heading[1]]]
    for p in steps["steps"]:
        n, seconds, bound = p["rows"], p["seconds"], max(p["memory_s"], p["arithmetic_s"])
        rates = [f"{n / seconds:,.0f}", f"{n / bound:,.0f}", f"{100 * p['reached']:.0f}%"]
        rows.append([str(n), _ms(seconds), *rates, _ms(without.get(n))])
    without = {p["prompt_tokens"]: p["seconds"] for p in eager.get("with_a_prompt", [])}
    mixed = [[f"tokens of a prompt beside {BESIDE} rows", *heading]]
    for p in steps["with_a_prompt"]:
        tokens = p["prompt_tokens"]
        mixed.append([str(tokens), _ms(p["seconds"]), _ms(without.get(tokens))])
    figure = "![Step time against the bound](step_time.png)"
    return [text, markdown(rows, left=0), figure, markdown(mixed, left=0)]


def report(
    result: Mapping[str, Any], config: Config, problems: Mapping[str, str], out: Path
) -> str:
    """gpu.md."""
    hardware = result["hardware"]
    made_on = processor(hardware, config.model_dump())
    text = [f"# {Path(config.model).name}, {config.dtype}, on {made_on}"]
    if agreement := result.get("agreement"):
        ids, logits = agreement["float32"], agreement["bfloat16"]
        text.append(
            f"Against the oracle (no cache, a request at a time): "
            f"in float32 {ids['equal']} of {ids['requests']} requests have its ids, "
            f"{ids['undecided']} part from it where it was itself undecided by less than rounding; "
            f"bfloat16 logits differ by {logits['largest_difference']:.3f} at most, "
            f"where the largest is {logits['largest_logit']:.1f}."
        )
    if steps := result.get("steps"):
        text += steps_part(steps, result.get("steps_eager", {}))
    if burst := result.get("burst"):
        ours = burst["modes"]["dynamic"]["output_throughput"]
        line = f"The burst of {result['burst_requests']} requests, without HTTP: {ours:,.0f} tok/s"
        if huggingface := result.get("burst_huggingface"):
            peer = huggingface["output_throughput"]
            line += (
                f", {ours / peer:.1f} times the {peer:,.0f} tok/s "
                f"of Hugging Face's generate() in one static batch"
            )
        text.append(line + ".")
    if seconds := result.get("startup_s"):
        engine = f", {steps['load_s']:.1f} s of them the engine's" if steps else ""
        text.append(f"A server is ready {seconds:.1f} s after its start{engine}.")
    if (comparison := out / "comparison" / "report.md").exists():
        is_bytes = config.tokenizer == "bytes"
        few = f", sampling from {VOCABULARIES[config.tokenizer]} ids" if is_bytes else ""
        text += [
            f"The four modes over HTTP{few} ([report](comparison/report.md)):",
            comparison.read_text().split("\n\n")[1],
        ]
    text += [f"**Missing: {name}** ({reason})" for name, reason in problems.items()]
    text.append(
        f"- {hardware['gpu'] or 'no GPU'}; {hardware['cpu']}, {hardware['cores']} cores; "
        f"torch {hardware['torch']}\n"
        f"- commit {result['commit']}, {result['date']}\n- `{result['command']}`"
    )
    return "\n\n".join(text) + "\n"


def main() -> None:
    deadline = time.monotonic() + 60 * MINUTES
    options, [config] = BENCHMARK.engine_configs(**DEFAULTS)
    settings = DEFAULTS | chosen_settings(options)
    out = options.out or Path("results/gpu") / config.model_name
    if out.exists() and not (out / "gpu.md").exists():
        raise ConfigError(f"{out} is there and holds no earlier run of this; choose another --out")
    shutil.rmtree(out, ignore_errors=True)  # no part of an earlier run stands under this one's name
    out.mkdir(parents=True)
    result: dict[str, Any] = {
        "command": command_line("benchmarks/gpu.sh", sys.argv[1:]),
        "config": config.model_dump(exclude={*ONLY_OVER_HTTP}),
        "burst_requests": options.n,
    } | stamp()
    problems: dict[str, str] = {}
    try:
        result["startup_s"] = startup_s(settings, deadline - time.monotonic())
    except ServerError as error:
        problems["start-up"] = str(error)
    for name, command in commands(options, settings, config.device == "cuda", out).items():
        problem, lines = call(command, out / f"{name}.txt", deadline - time.monotonic())
        if problem:
            problems[name] = problem
        if name == "comparison":
            continue
        if results := [line for line in lines if line.startswith("{")]:
            result[name] = json.loads(results[-1])
        elif not problem:
            problems[name] = "it printed no result"
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "gpu.md").write_text(report(result, config, problems, out))
    print(f"\n{(out / 'gpu.md').read_text()}\nwritten to {out}")
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
