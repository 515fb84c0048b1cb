"""All that is claimed of a GPU, measured in one command of at most six minutes: gpu.sh.

    python -m lab.benchmarks.gpu [--only PART] [--out FOLDER] [any server setting]

The default is gpt2-medium with random weights, without a download. Each part is a command of its
own, an entry of PARTS, with its worst case in seconds on an H200, by what they took there
(results/gpu/h200.md). One that fails or runs out of time leaves the others theirs. What they print
and write is kept in FOLDER, whose page is written anew after each. Ends with exit code 1 unless all
of them ran. `--device cpu` runs the same on a CPU, which is how it is tested. Needs `timeout`, of
GNU coreutils.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from client.machine import ROOT, command_line, processor
from compare.report.tables import NONE, markdown
from compare.servers import as_flag
from config.config import Config
from config.settings import NOT_SIMULATED, ONLY_OVER_HTTP, VOCABULARIES, ConfigError
from lab.benchmarks import agreement, burst, engine
from lab.benchmarks.harness import Benchmark, chosen_settings, run
from simulate import measure_costs
from simulate.costs import FOLDER
from simulate.simulation import ENGINE

SECONDS = 350  # for all parts together
STOP_S = 10  # for the last part to stop in
OUT_OF_TIME = (124, -9, 137)  # exit codes of `timeout`, if the part ended by SIGTERM, or did not
DEFAULTS: dict[str, Any] = {
    "model": "gpt2-medium",
    "weights": "random",
    "tokenizer": "bytes",
    "device": "cuda",
}
# ms of a greedy step of DEFAULTS in bfloat16 at CONTEXT, by GPU and rows: aims for an H200, and for
# an H100 as much more as it needs to read the same (3.0 TB/s, an H200 4.27)
CONTEXT = 256
TARGETS = {
    "H100": {1: 0.57, 8: 0.69, 32: 1.0, 128: 2.2, 256: 3.5},
    "H200": {1: 0.50, 8: 0.60, 32: 0.85, 128: 1.8, 256: 2.8},
}
DRAWN = 1.05  # times a greedy step: a step that draws at temperature 1
UNUSED: dict[str, Collection[str]] = {  # settings without effect on commands that begin so
    f"lab.benchmarks.{part.BENCHMARK.name} ": part.BENCHMARK.unused
    for part in (agreement, burst, engine)
} | {
    "simulate.measure_costs ": measure_costs.UNUSED,
    "simulate ": {*ENGINE, *NOT_SIMULATED},
    "compare --runs ": Config.model_fields,
}


class Part(NamedTuple):
    """A command of its own, and its place on the page."""

    heading: str
    command: str  # words after `python -m`; `commands` fills in what stands in braces
    seconds: int  # at most, on an H200
    table: int = 0  # which one of its own page is shown


STEPS = "lab.benchmarks.engine --rows {rows} --contexts {contexts} --out {out}/steps"
SAMPLED = f" --sampling {','.join(engine.SAMPLINGS)}"
COMPARE = "compare --skip-calibration "
VARIANTS = "--variant static=static --variant dynamic=dynamic "
SIMULATED = "--variant static='static{ahead}' --variant dynamic='dynamic{ahead}' "
# a closed loop needs no server that is started to measure a rate
PROMPTS = (
    "--numsamples {half} --arrival closed:{users} --prefixes 8:{prefix}:1 --stream "
    "--variant whole=dynamic --variant chunks='dynamic --token-budget 256' "
    "--variant cached='dynamic --prefix-caching' "
)
# fmt: off
PARTS = {
    "agreement": Part("Against the oracle, which has no cache and computes a request at a time",
        "lab.benchmarks.agreement --n {few}", 42),  # compiles what all parts need
    "steps": Part("Steps of decode rows, against the machine's bound",
        STEPS + SAMPLED, 20),
    # one round of traffic takes 25 s, and loading as long at worst
    "costs": Part("What an iteration costs, for the simulator",
        "simulate.measure_costs --seconds 1 --name {costs.stem} --out {costs.parent}", 47),
    "burst": Part("The burst, without HTTP", "lab.benchmarks.burst --n {n}", 8),
    "comparison": Part("Two modes, over HTTP",
        COMPARE + "--numsamples {numsamples} " + VARIANTS + "--out {out}/comparison", 56),
    "simulated": Part("The comparison's trace in virtual time, at these costs",
        "simulate --costs {costs} --trace {out}/comparison/trace.jsonl "
        + SIMULATED + "--out {out}/simulated", 10),
    "fidelity": Part("Measured and simulated: no request of this trace was fitted",
        "compare --runs {out}/comparison {out}/simulated --out {out}/fidelity", 3, table=1),
    "alone": Part("A burst, one request at a time and all together: are the texts the same?",
        COMPARE + "--variant nobatch=nobatch --variant dynamic=dynamic --numsamples {carried} "
        "--arrival burst --out {out}/alone", 33),
    "prompts": Part("Long prompts beside rows that decode: whole, in chunks, and from a cache",
        COMPARE + PROMPTS + "--out {out}/prompts", 49),
}
# fmt: on
BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    {
        "--only": ([], f"repeat this part, of {', '.join(PARTS)}; again for another"),
        "--rows": ("1,8,32,128,256", "of a step"),
        "--contexts": (f"{CONTEXT}", "tokens of each row"),
        "--n": (64, "requests of the burst"),
        "--numsamples": (300, "requests of a comparison"),
        "--out": (Path, "folder for the results, runs/gpu/MODEL if there is"),
    },
    ONLY_OVER_HTTP,
    of_engine=True,
)


def fitted(config: Config, out: Path, by: str) -> Path:
    """The file of the costs of this processor: of a GPU where `--costs NAME` finds it."""
    gpu = config.device == "cuda"
    [called, *_] = [*re.findall(r"[A-Z]+\d+", by if gpu else ""), config.device]
    return (FOLDER if gpu else out / "costs") / f"{called.lower()}-{config.model_name}.json"


def commands(options: Namespace, config: Config, out: Path, by: str) -> dict[str, list[str]]:
    """The words after `python -m` of each part. by: the processor, whose name a GPU's costs get."""
    values = vars(options) | {
        "few": min(8, options.n),
        "carried": max(2, options.numsamples // 8),  # nobatch takes 6 s for these on an H200
        "ahead": " --ahead" if config.ahead else "",
        "half": max(2, options.numsamples // 2),
        "users": min(32, max(2, options.numsamples // 4)),
        "prefix": config.max_model_len // 2,
        "out": out,
        "costs": fitted(config, out, by),
    }
    parts = {}
    for name, part in PARTS.items():
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
    with log.open("wb") as file:
        words = [*limit, sys.executable, "-u", "-m", *command]  # what was printed stays
        start = time.monotonic()
        with subprocess.Popen(words, stdout=file, stderr=file) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.terminate()  # `timeout` hands it on: its group is another than ours
                process.wait()
                raise
    if code in OUT_OF_TIME and time.monotonic() - start >= seconds:
        return f"its {seconds:.0f} s were not enough"
    [*_, said] = ["", *said_in(log)]
    return f"exit code {code}: {said}" if code else None


def said_in(log: Path) -> list[str]:
    """The lines for people of what a part printed."""
    text = log.read_text("utf-8", "replace")
    return [line for line in text.splitlines() if not line.startswith("{")]


def found(name: str, out: Path) -> str:
    """A table of a part's page, with what is said of it; without a page, its lines for people."""
    for written in (out / name).glob("*.md"):
        blocks = written.read_text("utf-8").split("\n\n")
        tables = [i for i, block in enumerate(blocks) if block.startswith("|")]
        for at in tables[PARTS[name].table :]:
            # and those that follow at once
            n = len([*takewhile(lambda block: block.startswith("|"), blocks[at:])])
            shown = "\n\n".join(blocks[at : at + n + 1]).strip().replace("](", f"]({name}/")
            return f"[All of it]({name}/{written.name}):\n\n{shown}"
    return "\n".join(["```", *said_in(out / f"{name}.txt"), "```"])


def targets(steps: Sequence[Mapping[str, Any]], aims: Mapping[int, float]) -> str:
    """A line for each number of rows at CONTEXT: the bound, a greedy step alone, one in a sequence,
    as the server has them, beside its target; and how many times as long one takes that draws.
    aims: the targets in ms, by rows, if there are any of this GPU and these settings.
    """
    of = {(step["rows"], step["sampling"]): step for step in steps if step["context"] == CONTEXT}
    drawn = [name for name in engine.SAMPLINGS if name != "greedy"]
    ratios = [f"{name} ÷ greedy" for name in drawn]
    first = ["rows", "bound, ms", "alone, ms", "in a sequence, ms", "target, ms"]
    lines = [[*first, *ratios, f"{drawn[0]}'s target"]]
    for n in sorted({n for n, _ in of}):
        greedy = of[n, "greedy"]
        how = "of_sequence_s" if greedy.get("of_sequence_s") else "seconds"
        times = [of[n, name][how] / greedy[how] for name in drawn]
        lines.append([
            str(n), f"{1e3 * max(greedy['memory_s'], greedy['arithmetic_s']):.2f}",
            f"{1e3 * greedy['seconds']:.2f}",
            f"{1e3 * greedy[how]:.2f}" if how == "of_sequence_s" else NONE,
            met(1e3 * greedy[how], aims.get(n)),
            *(f"{each:.2f}" for each in times), met(times[0], DRAWN if aims else None),
        ])  # fmt: skip
    return markdown(lines, left=0)


def met(found: float, most: float | None) -> str:
    """A target, and whether it is met."""
    return f"{most:.2f} ({'met' if found <= most else '**missed**'})" if most else NONE


def section(name: str, ran: Mapping[str, Any] | None, out: Path) -> str:
    """A part on the page: what it found, how, and what is missing."""
    if ran is None:
        return f"**Missing: {name}** (not in this run)"
    took = f"{ran['seconds']:.0f} s of {PARTS[name].seconds}"
    how = f"`python -m {ran['command']}`: {took}, commit {ran['commit']}"
    blocks = [f"## {PARTS[name].heading}", f"{how}, {ran['date']}.", found(name, out)]
    steps = out / name / "engine.json"
    if SAMPLED in PARTS[name].command and steps.exists():
        result = json.loads(steps.read_text("utf-8"))
        settings, gpu = result["config"], result["hardware"]["gpu"] or ""
        ours = (settings["model"], settings["dtype"]) == (DEFAULTS["model"], "bfloat16")
        of_gpu = (aims for called, aims in TARGETS.items() if ours and called in gpu)
        blocks.append(targets(result["steps"], next(of_gpu, {})))
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
        earlier = json.loads(saved.read_text("utf-8"))
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
    deadline = time.monotonic() + SECONDS
    options, [config] = BENCHMARK.configs(**DEFAULTS)
    out = options.out or Path(os.path.relpath(ROOT / "runs" / "gpu" / config.model_name))
    result = BENCHMARK.record([config])
    hardware, by = result["hardware"], processor(result["hardware"], config.model_dump())
    parts = commands(options, config, out, by)
    if unknown := [name for name in options.only if name not in parts]:
        raise ConfigError(f"--only {unknown[0]}: the parts are {', '.join(parts)}")
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
        if name == "costs":  # else `simulated` would take old ones where this part is cut
            fitted(config, out, by).unlink(missing_ok=True)
        start = time.monotonic()
        # what a part leaves of its seconds goes to those after it
        left = sum(PARTS[each].seconds for each in todo[k:])
        seconds = (deadline - start) * PARTS[name].seconds / left
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
