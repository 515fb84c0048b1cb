"""All that is claimed of a GPU, measured in one command of at most nine minutes: benchmarks/gpu.sh.

    python -m benchmarks.gpu [--out FOLDER] [any server setting]

The default is gpt2-medium with random weights, without a download. Each part is a command of its
own, whose output is kept in FOLDER; one that fails or runs out of time leaves the others. Ends with
exit code 1 unless all of them ran. `--device cpu` runs the same on a CPU, which is how it is
tested. Needs `timeout`, of GNU coreutils.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import agreement, burst, engine
from benchmarks.harness import Benchmark, chosen_settings, run
from client.calls import ServerError
from compare.machine import command_line, processor
from compare.servers import as_flag, server
from config import ONLY_OVER_HTTP, Config, ConfigError
from config.resolve import VOCABULARIES

MINUTES = 8.5
STOP_S = 30  # for the last part to stop in
OUT_OF_TIME = (124, -9, 137)  # exit codes of `timeout`, if the part ended by SIGTERM, or did not
DEFAULTS: dict[str, Any] = {
    "model": "gpt2-medium",
    "weights": "random",
    "tokenizer": "bytes",
    "device": "cuda",
}
UNUSED = {  # settings without effect on a part
    f"benchmarks.{part.BENCHMARK.name}": part.BENCHMARK.unused
    for part in (agreement, burst, engine)
} | {"benchmarks.peers.engines": Config.model_fields}
HEADINGS = {
    "agreement": "Against the oracle, which has no cache and computes a request at a time",
    "steps": "Steps of decode rows, against the machine's bound",
    "eager": "Steps without CUDA graphs",
    "burst": "The burst, without HTTP",
    "generate": "The burst by Hugging Face's generate(), in one static batch",
    "comparison": "The four modes over HTTP",
}
BENCHMARK = Benchmark(
    "gpu",
    "All that is claimed of a GPU, measured (benchmarks/gpu.sh).",
    {
        "--rows": ("1,8,32,128,256", "of a step"),
        "--context": ("256", "tokens of each row"),
        "--n": (64, "requests of the burst"),
        "--numsamples": (500, "requests of the comparison"),
        "--out": (Path, "folder for the results, results/gpu/MODEL if there is"),
    },
    ONLY_OVER_HTTP,
    of_engine=True,
)


def commands(options: Namespace, config: Config, out: Path) -> dict[str, list[str]]:
    """The words after `python -m` of each part, in order, with the settings that have an effect."""
    n = str(options.n)
    steps = ["--rows", options.rows, "--contexts", options.context]
    modes = ["--numsamples", str(options.numsamples), "--skip-calibration"]
    own = {"model": config.model, "dtype": config.dtype, "device": config.device}
    generate = [word for name, value in own.items() for word in as_flag(name, value)]
    parts = {
        "agreement": ["benchmarks.agreement", "--n", str(min(8, options.n))],
        "steps": ["benchmarks.engine", *steps, "--out", str(out / "steps")],
        "eager": ["benchmarks.engine", *steps, "--out", str(out / "eager"), "--enforce-eager"],
        "burst": ["benchmarks.burst", "--n", n],
        "generate": ["benchmarks.peers.engines", "huggingface", "--n", n, *generate],
        "comparison": ["compare", *modes, "--out", str(out / "comparison")],
    }
    if config.device == "cpu":
        del parts["eager"]  # no CUDA graphs are captured there
    for words in parts.values():
        for name, value in (DEFAULTS | chosen_settings(options)).items():
            if name not in UNUSED.get(words[0], ()):
                words += as_flag(name, value)
    return parts


def text_of(name: str, out: Path) -> str:
    """The table of the page that a part wrote; if it wrote none, its lines for people."""
    for written in (out / name).glob("*.md"):
        blocks = written.read_text().split("\n\n")
        table = next(block for block in blocks if block.startswith("|"))
        return f"[All of it]({name}/{written.name}):\n\n{table}"
    log = out / f"{name}.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    return "\n".join(["```", *(line for line in lines if not line.startswith("{")), "```"])


def call(command: Sequence[str], log: Path, seconds: float) -> str | None:
    """Run `python -m …`, whose output goes to `log`; return the problem, if any."""
    if seconds <= 0:
        return "no time was left"
    # after SIGTERM a comparison stops its servers and keeps what it has
    limit = ["timeout", f"--kill-after={STOP_S}", f"{seconds:.3f}"]
    with log.open("w") as file:
        words = [*limit, sys.executable, "-m", *command]
        code = subprocess.run(words, stdout=file, stderr=file).returncode
    if code in OUT_OF_TIME:
        return "no time was left to finish it"
    return f"exit code {code}: {log.read_text().strip()[-300:]}" if code else None


def body(result: Mapping[str, Any], config: Config, texts: Mapping[str, str]) -> str:
    """Parts and problems, for the page."""
    blocks = [f"## {HEADINGS[name]}\n\n{text}" for name, text in texts.items()]
    if "startup_s" in result:
        blocks.insert(0, f"A server is ready {result['startup_s']:.1f} s after its start.")
    if config.tokenizer == "bytes":
        blocks.append(f"Servers sample from {VOCABULARIES['bytes']} ids.")
    blocks += [f"**Missing: {name}** ({reason})" for name, reason in result["problems"].items()]
    return "\n\n".join(blocks)


def main() -> None:
    deadline = time.monotonic() + 60 * MINUTES
    options, [config] = BENCHMARK.configs(**DEFAULTS)
    out = options.out or Path("results/gpu") / config.model_name
    if out.exists() and not (out / "gpu.md").exists():
        raise ConfigError(f"{out} is there and holds no earlier run of this; choose another --out")
    shutil.rmtree(out, ignore_errors=True)  # no part of an earlier run stands under this one's name
    out.mkdir(parents=True)
    problems: dict[str, str] = {}
    result = BENCHMARK.record([config]) | {"problems": problems}
    result["command"] = command_line("benchmarks/gpu.sh", sys.argv[1:])
    start = time.monotonic()
    try:
        with server("dynamic", DEFAULTS | chosen_settings(options), deadline - start):
            result["startup_s"] = time.monotonic() - start
    except ServerError as error:
        problems["start-up"] = str(error)
    texts = {}
    for name, command in commands(options, config, out).items():
        print(f"\n$ python -m {shlex.join(command)}", flush=True)
        problem = call(command, out / f"{name}.txt", deadline - time.monotonic())
        texts[name] = text_of(name, out)
        print(texts[name], problem or "", flush=True)
        if problem:
            problems[name] = problem
    hardware = result["hardware"]
    title = f"{config.model_name}, {config.dtype}, on {processor(hardware, config.model_dump())}"
    setup = (
        f"{hardware['gpu'] or 'no GPU'}; {hardware['cpu']}, {hardware['cores']} cores; "
        f"torch {hardware['torch']}"
    )
    BENCHMARK.write(out, title, setup, body(result, config, texts), result)
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
