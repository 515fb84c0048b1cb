"""All that is claimed of a GPU, measured in one command of at most nine minutes: gpu.sh.

    python -m lab.benchmarks.gpu [--only PART] [--out FOLDER] [any server setting]

The default is gpt2-medium with random weights, without a download. Each part is a command of its
own, an entry of PARTS; one that fails or runs out of time leaves the others theirs. What they print
and write is kept in FOLDER, whose page is written anew after each. Ends with exit code 1 unless all
of them ran. `--device cpu` runs the same on a CPU, which is how it is tested. Needs `timeout`, of
GNU coreutils.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from client.machine import command_line, processor
from compare.report.tables import NONE, markdown
from compare.servers import as_flag
from config import NOT_SIMULATED, ONLY_OVER_HTTP, Config, ConfigError
from config.settings import VOCABULARIES
from lab.benchmarks import agreement, burst, costs, engine
from lab.benchmarks.harness import Benchmark, chosen_settings, run
from simulate.costs import FOLDER
from simulate.simulation import ENGINE

MINUTES = 8.5
STOP_S = 30  # for the last part to stop in
OUT_OF_TIME = (124, -9, 137)  # exit codes of `timeout`, if the part ended by SIGTERM, or did not
DEFAULTS: dict[str, Any] = {
    "model": "gpt2-medium",
    "weights": "random",
    "tokenizer": "bytes",
    "device": "cuda",
}
# tok/s of DEFAULTS in bfloat16 at CONTEXT on an H100, by rows; half of the bound from MANY on
CONTEXT, TARGETS = 256, {1: 2e3, 8: 13e3, 32: 40e3, 128: 80e3}
LEAST, MANY = {1: 1.5e3}, 32
UNUSED: dict[str, Collection[str]] = {  # settings without effect on commands that begin so
    f"lab.benchmarks.{part.BENCHMARK.name} ": part.BENCHMARK.unused
    for part in (agreement, burst, costs, engine)
} | {
    "simulate ": {*ENGINE, *NOT_SIMULATED},
    "compare --runs ": Config.model_fields,
    "lab.benchmarks.peers.engines ": Config.model_fields,
}
GPU = "a GPU"


class Part(NamedTuple):
    """A command of its own, and its place on the page."""

    heading: str
    command: str  # words after `python -m`; `commands` fills in what stands in braces
    share: int  # seconds, if every part takes all of its share
    needs: str = ""  # GPU, or a package, without which it is left out
    table: int = 0  # which one of its own page is shown


STEPS = "lab.benchmarks.engine --rows {rows} --contexts {contexts} --out {out}/"
COMPARE = "compare --skip-calibration "
OVER_HTTP = COMPARE + "--numsamples {numsamples} "
MODES = (
    "--variant nobatch=nobatch --variant static=static --variant windowed=windowed "
    "--variant dynamic=dynamic "
)
VARIANTS = MODES + "--variant sjf='dynamic --order sjf' --variant ahead='dynamic --ahead' "
PROMPTS = (
    "--prefixes 8:{prefix}:1 --stream --variant whole=dynamic "
    "--variant chunks='dynamic --token-budget 256' --variant cached='dynamic --prefix-caching' "
)
# fmt: off
PARTS = {
    "agreement": Part("Against the oracle, which has no cache and computes a request at a time",
        "lab.benchmarks.agreement --n {few}", 120),  # compiles what all parts need
    "steps": Part("Steps of decode rows, against the machine's bound", STEPS + "steps", 80),
    "eager": Part("Steps without CUDA graphs",
        STEPS + "eager --decoder-batch-sizes none", 60, needs=GPU),
    "cublas": Part("Steps with PyTorch's products, eight launches a layer",
        STEPS + "cublas --linear plain", 60, needs=GPU),
    "invariant": Part("Steps with --batch-invariant: what identical texts cost, by rows",
        STEPS + "invariant --batch-invariant", 60, needs=GPU),
    "burst": Part("The burst, without HTTP", "lab.benchmarks.burst --n {n}", 40),
    "comparison": Part("The four modes, an order, and plans ahead, over HTTP",
        OVER_HTTP + VARIANTS + "--out {out}/comparison", 150),
    "identical": Part("The modes again with --batch-invariant: are their texts the same?",
        COMPARE + MODES + "--batch-invariant --trace {out}/comparison/trace.jsonl "
        "--out {out}/identical", 90, needs=GPU),
    "price": Part("What identical texts cost a whole server",
        "compare --runs {out}/comparison {out}/identical --out {out}/price", 15, needs=GPU,
        table=1),
    "prompts": Part("Long prompts beside rows that decode: whole, in chunks, and from a cache",
        OVER_HTTP + PROMPTS + "--out {out}/prompts", 90),
    "costs": Part("What an iteration costs, for the simulator",
        "lab.benchmarks.costs --seconds 30 --name {costs.stem} --out {costs.parent}", 90),
    "simulated": Part("The comparison's trace in virtual time, at these costs",
        "simulate --costs {costs} --trace {out}/comparison/trace.jsonl "
        + VARIANTS + "--out {out}/simulated", 25),
    "fidelity": Part("Measured and simulated: no request of this trace was fitted",
        "compare --runs {out}/comparison {out}/simulated --out {out}/fidelity", 15, table=1),
    "generate": Part("The burst by Hugging Face's generate(), in one static batch",
        "lab.benchmarks.peers.engines huggingface --n {n} --model {model} --dtype {dtype} "
        "--device {device}", 40, needs="transformers"),
}
# fmt: on
BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    {
        "--only": ([], f"repeat this part, of {', '.join(PARTS)}; again for another"),
        "--rows": ("1,8,32,128,256", "of a step"),
        "--contexts": (f"{CONTEXT},512", "tokens of each row"),
        "--n": (64, "requests of the burst"),
        "--numsamples": (300, "requests of a comparison"),
        "--out": (Path, "folder for the results, results/gpu/MODEL if there is"),
    },
    ONLY_OVER_HTTP,
    of_engine=True,
)


def commands(options: Namespace, config: Config, out: Path, by: str) -> dict[str, list[str]]:
    """The words after `python -m` of each part. by: the processor, whose name a GPU's costs get."""
    gpu = config.device == "cuda"
    [called, *_] = [*re.findall(r"[A-Z]+\d+", by if gpu else ""), config.device]
    values = vars(options) | {
        "few": min(8, options.n),
        "prefix": config.max_model_len // 2,
        "out": out,
        "costs": (FOLDER if gpu else out / "costs") / f"{called.lower()}-{config.model_name}.json",
        **{each: getattr(config, each) for each in ("model", "dtype", "device")},
    }
    parts = {}
    for name, part in PARTS.items():
        if not (gpu if part.needs == GPU else find_spec(part.needs or "torch")):
            continue
        unused = next((UNUSED[each] for each in UNUSED if part.command.startswith(each)), ())
        parts[name] = [word.format(**values) for word in shlex.split(part.command)]
        for setting, value in (DEFAULTS | chosen_settings(options)).items():
            parts[name] += as_flag(setting, value) if setting not in unused else []
    return parts


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
        return f"its {seconds:.0f} s were not enough"
    [*_, said] = ["", *log.read_text().splitlines()]
    return f"exit code {code}: {said}" if code else None


def found(name: str, out: Path) -> str:
    """A table of a part's page, with what is said of it; without a page, its lines for people."""
    for written in (out / name).glob("*.md"):
        blocks = written.read_text().split("\n\n")
        tables = [i for i, block in enumerate(blocks) if block.startswith("|")]
        for at in tables[PARTS[name].table :]:
            shown = "\n\n".join(blocks[at : at + 2]).strip().replace("](", f"]({name}/")
            return f"[All of it]({name}/{written.name}):\n\n{shown}"
    lines = (out / f"{name}.txt").read_text().splitlines()
    return "\n".join(["```", *(line for line in lines if not line.startswith("{")), "```"])


def targets(steps: Sequence[Mapping[str, Any]], ours: bool) -> str:
    """A line for each step of CONTEXT: the bound, what was measured, and whether that is enough.

    ours: TARGETS are of this GPU and these settings.
    """
    lines = [["rows", "bound, tok/s", "measured, tok/s", "at least", "target"]]
    for step in (step for step in steps if step["context"] == CONTEXT):
        n = step["rows"]
        bound, measured = n / max(step["memory_s"], step["arithmetic_s"]), n / step["seconds"]
        least, target = ((each if ours else {}).get(n) for each in (LEAST, TARGETS))
        goals = [
            f"{goal:,.0f} ({'met' if measured >= goal else '**missed**'})" if goal else NONE
            for goal in (bound / 2 if n >= MANY else least, target)
        ]
        lines.append([str(n), f"{bound:,.0f}", f"{measured:,.0f}", *goals])
    return markdown(lines, left=0)


def section(name: str, ran: Mapping[str, Any] | None, out: Path) -> str:
    """A part on the page: what it found, how, and what is missing."""
    if ran is None:
        needs = f": it needs {PARTS[name].needs}" if PARTS[name].needs else ""
        return f"**Missing: {name}** (not measured here{needs})"
    how = f"`python -m {ran['command']}`: {ran['seconds']:.0f} s, commit {ran['commit']}"
    blocks = [f"## {PARTS[name].heading}", f"{how}, {ran['date']}.", found(name, out)]
    if name == "steps" and (steps := out / name / "engine.json").exists():
        result = json.loads(steps.read_text())
        settings, gpu = result["config"], result["hardware"]["gpu"] or ""
        ours = (settings["model"], settings["dtype"]) == (DEFAULTS["model"], "bfloat16")
        blocks.append(targets(result["steps"], ours and "H100" in gpu))
    if ran["problem"]:
        blocks.append(f"**Missing: {name}** ({ran['problem']})")
    return "\n\n".join(blocks)


def kept(out: Path, result: Mapping[str, Any], only: Collection[str]) -> dict[str, Any]:
    """The parts that --only keeps of an earlier run in `out`; else empty `out` and return none.
    Raises ConfigError.
    """
    saved = out / "gpu.json"
    if out.exists() and not saved.exists():
        raise ConfigError(f"{out} is there and holds no earlier run of this; choose another --out")
    if only and saved.exists():
        earlier = json.loads(saved.read_text())
        now, then = (json.dumps([r["config"], r["hardware"]["gpu"]]) for r in (result, earlier))
        if now != then:
            raise ConfigError(
                f"--only keeps the other parts of {out}, which have other settings or another GPU; "
                "give the same settings, or another --out"
            )
        return dict(earlier["parts"])
    shutil.rmtree(out, ignore_errors=True)  # no part of an earlier run stands under this one's name
    out.mkdir(parents=True)
    return {}


def main() -> None:
    deadline = time.monotonic() + 60 * MINUTES
    options, [config] = BENCHMARK.configs(**DEFAULTS)
    out = options.out or Path("results/gpu") / config.model_name
    result = BENCHMARK.record([config])
    hardware, by = result["hardware"], processor(result["hardware"], config.model_dump())
    parts = commands(options, config, out, by)
    if unknown := [name for name in options.only if name not in parts]:
        raise ConfigError(f"--only {unknown[0]}: the parts here are {', '.join(parts)}")
    todo = [name for name in parts if name in (options.only or parts)]
    result["command"] = command_line("lab/benchmarks/gpu.sh", sys.argv[1:])
    result["parts"] = kept(out, result, options.only)
    title = f"{config.model_name}, {config.dtype}, on {by}"
    setup = (
        f"{hardware['gpu'] or 'no GPU'}; {hardware['cpu']}, {hardware['cores']} cores; "
        f"torch {hardware['torch']}"
    )
    if config.tokenizer == "bytes":
        setup += f"; servers sample from {VOCABULARIES['bytes']} ids"

    def write() -> None:
        page = "\n\n".join(section(name, result["parts"].get(name), out) for name in PARTS)
        with contextlib.redirect_stdout(None):
            BENCHMARK.write(out, title, setup, page, result)

    for k, name in enumerate(todo):
        write()  # kept, whatever ends this
        command = shlex.join(parts[name])
        print(f"\n$ python -m {command}", flush=True)
        shutil.rmtree(out / name, ignore_errors=True)
        start = time.monotonic()
        # what a part leaves of its share goes to those after it
        seconds = (deadline - start) * PARTS[name].share / sum(PARTS[n].share for n in todo[k:])
        problem = call(parts[name], out / f"{name}.txt", seconds)
        ran = {"command": command, "seconds": time.monotonic() - start, "problem": problem}
        result["parts"][name] = ran | {key: result[key] for key in ("commit", "date")}
        print(section(name, result["parts"][name], out), flush=True)
    write()
    print(f"gpu.md and gpu.json: {out}")
    if any(result["parts"][name]["problem"] for name in todo):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
