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
from benchmarks.engine import BESIDE
from benchmarks.harness import Benchmark, chosen_settings, run
from client.calls import ServerError
from compare.machine import command_line, processor, stamp
from compare.servers import as_flag, server
from config import ONLY_OVER_HTTP, Config, ConfigError
from config.resolve import VOCABULARIES

MINUTES = 8.5
STOP_S = 30  # for the last part to stop in
DEFAULTS = {"model": "gpt2-medium", "weights": "random", "tokenizer": "bytes", "device": "cuda"}
UNUSED = {  # settings without effect on a part
    f"benchmarks.{part.BENCHMARK.name}": part.BENCHMARK.unused
    for part in (agreement, burst, engine, huggingface)
}
HEADINGS = {
    "agreement": "Against the oracle, which has no cache and computes a request at a time",
    "steps": "Steps of decode rows, against the machine's bound",
    "steps_eager": "Steps without CUDA graphs",
    "burst": "The burst, without HTTP",
    "burst_huggingface": "The burst by Hugging Face's generate(), in one static batch",
    "comparison": "The four modes over HTTP",
}
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


def commands(
    options: Any, settings: Mapping[str, Any], gpu: bool, out: Path
) -> dict[str, list[str]]:
    """The commands in order, each with the settings that have an effect there."""
    n = str(options.n)
    steps = ["benchmarks.engine", "--rows", options.rows, "--contexts", options.context]
    steps += ["--prompts", options.prompts]
    modes = ["compare", "--numsamples", str(options.numsamples), "--skip-calibration"]
    parts = {
        "agreement": ["benchmarks.agreement", "--n", str(min(8, options.n))],
        "steps": [*steps, "--out", str(out)],
        "steps_eager": [*steps, "--out", str(out / "eager"), "--enforce-eager"],
        "burst": ["benchmarks.burst", "--n", n],
        "burst_huggingface": ["benchmarks.huggingface", "--n", n],
        "comparison": [*modes, "--out", str(out / "comparison")],
    }
    if not gpu:
        del parts["steps_eager"]  # nothing is captured there
    for words in parts.values():
        for name, value in settings.items():
            if name not in UNUSED.get(words[0], ()):
                words += as_flag(name, value)
    return parts


def call(command: Sequence[str], log: Path, seconds: float) -> tuple[str | None, list[str]]:
    """Run `python -m …`; return the problem, if any, and its lines, which go to `log`."""
    print(f"\n$ python -m {shlex.join(command)}", flush=True)
    if seconds <= 0:
        return "no time was left", []
    problem, command = None, [sys.executable, "-m", *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    print("\n".join([*shown(output.splitlines()), *filter(None, [problem])]), flush=True)
    return problem, output.splitlines()


def shown(lines: Sequence[str]) -> list[str]:
    """Lines for people: all but the results."""
    return [line for line in lines if not line.startswith("{")]


def startup_s(settings: Mapping[str, Any], seconds: float) -> float:
    """From the launcher's start until the server is ready. Raises ServerError after `seconds`."""
    start = time.perf_counter()
    with server("dynamic", settings, seconds):
        return time.perf_counter() - start


def four_modes(config: Config, out: Path) -> str:
    """The table of the comparison's report."""
    table = (out / "comparison" / "report.md").read_text().split("\n\n")[1]
    is_bytes = config.tokenizer == "bytes"
    few = f", sampling from {VOCABULARIES[config.tokenizer]} ids" if is_bytes else ""
    return f"[All of it](comparison/report.md){few}:\n\n{table}"


def page(
    result: Mapping[str, Any],
    config: Config,
    printed: Mapping[str, Sequence[str]],
    problems: Mapping[str, str],
    out: Path,
) -> str:
    """gpu.md: what each part has printed."""
    hardware = result["hardware"]
    made_on = processor(hardware, config.model_dump())
    text = [f"# {Path(config.model).name}, {config.dtype}, on {made_on}"]
    if "startup_s" in result:
        text.append(f"A server is ready {result['startup_s']:.1f} s after its start.")
    if "burst" in result and "burst_huggingface" in result:
        ours = result["burst"]["modes"]["dynamic"]["output_throughput"]
        ratio = ours / result["burst_huggingface"]["output_throughput"]
        text.append(f"The burst: {ratio:.1f} times the throughput of Hugging Face's generate().")
    for name, lines in printed.items():
        if name in result:
            text += [f"## {HEADINGS[name]}", "\n".join(["```", *shown(lines), "```"])]
        elif (out / name / "report.md").exists():
            text += [f"## {HEADINGS[name]}", four_modes(config, out)]
    text += [f"**Missing: {name}** ({reason})" for name, reason in problems.items()]
    if (out / "step_time.png").exists():
        text.append("![Step time against the bound](step_time.png)")
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
    printed: dict[str, list[str]] = {}
    try:
        result["startup_s"] = startup_s(settings, deadline - time.monotonic())
    except ServerError as error:
        problems["start-up"] = str(error)
    for name, command in commands(options, settings, config.device == "cuda", out).items():
        problem, lines = call(command, out / f"{name}.txt", deadline - time.monotonic())
        printed[name] = lines
        if results := [line for line in lines if line.startswith("{")]:
            result[name] = json.loads(results[-1])
        elif name != "comparison":
            problem = problem or "it printed no result"
        if problem:
            problems[name] = problem
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "gpu.md").write_text(page(result, config, printed, problems, out))
    print(f"\n{(out / 'gpu.md').read_text()}\nwritten to {out}")
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
