"""Answers a second of several replicas behind a front end, and how old a router's knowledge is.

    python -m benchmarks.replicas [--rounds 3] [--out results/replicas]

Plain answers a second of 1, 2 and 4 replicas on Ray Serve. The fake engine sleeps, and so long that
all processes together, clients too, leave the cores time to spare: replicas, and not cores, are
what is counted. Last, the age of the reports that a router goes by. Three minutes; nothing else
should run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.clients import Body, load
from benchmarks.fronts import PROMPT_TOKENS, ROWS, body_of, front
from benchmarks.harness import Benchmark, Round, alternate, mean, mean_ratio, run
from client.calls import get
from compare.report.tables import formatted, markdown
from deploy.kinds import KINDS
from generate.fake import ITERATION_S, PREFILL_TOKEN_S, ROW_S

SIZES = (1, 2, 4)
TARGETS = {2: 2.0, 4: 3.6}  # times one replica's answers, at least
CLIENTS = 3 * ROWS  # of each replica, so that its rows are full however requests are routed
SHORTEST, LONGEST = 12, 20  # completion tokens, so that answers do not come all at once
SLOWDOWN = 30.0
BUSIEST = 60.0  # % of all cores: beyond it cores may be the limit
WARM_S = 3.0
BENCHMARK = Benchmark(
    "replicas",
    "Answers a second of several replicas, and the age of a router's reports.",
    {
        "--rounds": (3, "of each number of replicas"),
        "--seconds": (8.0, "of counting answers"),
        "--slowdown": (SLOWDOWN, "of the fake engine"),
        "--out": (Path("runs/replicas"), "folder"),
    },
)


def most_answers(slowdown: float) -> float:
    """A second, of a replica whose rows are full, if nothing but its engine takes time."""
    tokens = (SHORTEST + LONGEST) / 2
    prefill = PREFILL_TOKEN_S * PROMPT_TOKENS * ROWS / tokens
    return ROWS / tokens / (slowdown * (ITERATION_S + ROW_S * ROWS + prefill))


def answers(url: str, replicas: int, seconds: float) -> Round:
    """Answers a second while all rows are full."""
    rng = random.Random(0)

    def bodies() -> Iterator[Body]:
        yield body_of(rng.randint(1, LONGEST), stream=False)  # so that not all end together
        while True:
            yield body_of(rng.randint(SHORTEST, LONGEST), stream=False)

    seen = load(url, bodies, replicas * CLIENTS, seconds, WARM_S)
    return {"answers_per_s": seen.answers_per_s, "busy_percent": seen.busy_percent}


def scaling(rounds: int, seconds: float, slowdown: float) -> dict[int, list[Round]]:
    def one(n: int) -> Round:
        with front("ray", n, slowdown) as url:
            measured = answers(url, n, seconds)
        print(
            f"{n} replicas: {measured['answers_per_s']:.1f} answers a second, "
            f"{measured['busy_percent']:.0f}% of the CPU",
            flush=True,
        )
        return measured

    return alternate(SIZES, one, rounds)


def scaling_table(found: Mapping[int, Sequence[Round]], slowdown: float) -> str:
    rows = [["replicas", "answers/s", "of what the engines can do, %", "times one", "target",
             "CPU in use, %"]]  # fmt: skip
    for n, rounds in found.items():
        rate = mean(rounds, "answers_per_s")
        ratio = formatted(mean_ratio(rounds, found[1], "answers_per_s"), "{:.2f}")
        busiest = max(each["busy_percent"] for each in rounds)
        rows.append([
            str(n),
            formatted(rate, "{:.1f}"),
            f"{100 * rate.mean / (n * most_answers(slowdown)):.0f}",
            "" if n == 1 else ratio,
            f"{TARGETS[n]:g}" if n in TARGETS else "",
            f"{busiest:.0f}" + " (too busy: cores may be the limit)" * (busiest > BUSIEST),
        ])  # fmt: skip
    return markdown(rows)


def report_ages(seconds: float) -> dict[str, float]:
    """Milliseconds since a replica's report, whenever a router goes by it."""
    with front("ray", 2, SLOWDOWN, KINDS["ray"].routers.index("least_tokens")) as url:
        answers(url, 2, seconds)
        return dict(get(f"{url}/stats")["report_age_ms"])


def main() -> None:
    options = BENCHMARK.parse()
    found = scaling(options.rounds, options.seconds, options.slowdown)
    ages = report_ages(options.seconds)
    body = "\n\n".join([
        "## Plain answers a second",
        scaling_table(found, options.slowdown),
        "## What a router knows",
        "When `least_tokens` chooses, a replica's report is "
        + ", ".join(f"{name} {value:.0f} ms" for name, value in ages.items()) + " old.",
    ])  # fmt: skip
    setup = (
        f"mode dynamic, {ROWS} rows a replica, the fake engine slowed down by {options.slowdown:g};"
        f" {SHORTEST} to {LONGEST} tokens an answer, {CLIENTS} clients a replica; means of "
        f"{options.rounds} rounds ± half of a 95% t interval"
    )
    cases = [{"replicas": n, "seeds": rounds} for n, rounds in found.items()]
    result = {"scaling": cases, "report_age_ms": ages} | BENCHMARK.record()
    BENCHMARK.write(options.out, "What replicas give", setup, body, result)


if __name__ == "__main__":
    run(main)
