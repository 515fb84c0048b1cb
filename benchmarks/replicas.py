"""What replicas give behind a front end, and what a router knows of them.

    python -m benchmarks.replicas [--rounds 3] [--out results/replicas]

Plain answers a second of 1, 2 and 4 replicas on Ray Serve, to clients that ask as soon as they are
answered. The fake engine sleeps, and so long that all processes together, clients too, leave the
cores time to spare: replicas, and not cores, are what is counted. Last, how old the reports are
that a router goes by. Three minutes; nothing else should run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import run
from benchmarks.fronts import PROMPT_TOKENS, ROWS, Body, Round, asking, body_of, front
from client.calls import get
from compare.report.tables import formatted, markdown
from deploy.kinds import KINDS
from generate.fake import ITERATION_S, PREFILL_TOKEN_S, ROW_S
from studies.runner import Page, write
from studies.study import Case, mean, ratio

PAGE = Page("benchmarks.replicas", "replicas", "What replicas give")
SIZES = (1, 2, 4)
TARGETS = {2: 2.0, 4: 3.6}  # times one replica's answers, at least
CLIENTS = 3 * ROWS  # of each replica, so that its rows are full whoever gets the next request
SHORTEST, LONGEST = 12, 20  # completion tokens, so that answers do not come all at once
SLOWDOWN = 30.0
BUSIEST = 60.0  # % of all cores: beyond it cores may be what limits
WARM_S = 3.0


# ---- answers a second


def most_answers(slowdown: float) -> float:
    """A second, of a replica whose rows are full, if nothing but its engine takes time."""
    mean = (SHORTEST + LONGEST) / 2
    prefill = PREFILL_TOKEN_S * PROMPT_TOKENS * ROWS / mean
    return ROWS / mean / (slowdown * (ITERATION_S + ROW_S * ROWS + prefill))


def answers(url: str, replicas: int, seconds: float) -> Round:
    """What is answered while all rows are full."""
    drawn = random.Random(0)

    def bodies() -> Iterator[Body]:
        yield body_of(
            drawn.randint(1, LONGEST), stream=False
        )  # not all end together, from the start
        while True:
            yield body_of(drawn.randint(SHORTEST, LONGEST), stream=False)

    busy = asking(url, replicas * CLIENTS, seconds, bodies, WARM_S)
    return {
        "answers_per_s": len(busy.took_s) / busy.seconds, "busy_percent": busy.busy_percent,
    }  # fmt: skip


def scaling(rounds: int, seconds: float, slowdown: float) -> list[Case]:
    """Rounds go there and back, since a machine's speed changes."""
    found: dict[int, list[Round]] = {n: [] for n in SIZES}
    for k in range(rounds):
        for n in SIZES if k % 2 == 0 else SIZES[::-1]:
            with front("ray", n, slowdown) as url:
                found[n].append(mine := answers(url, n, seconds))
            print(f"{n} replicas: {mine['answers_per_s']:.1f} answers a second, "
                  f"{mine['busy_percent']:.0f}% of the CPU", flush=True)  # fmt: skip
    return [{"replicas": n, "seeds": mine} for n, mine in found.items()]


def scaling_table(cases: Sequence[Case], slowdown: float) -> str:
    most, [one, *_] = most_answers(slowdown), cases
    rows = [["replicas", "answers/s", "of what the engines can do, %", "times one", "target",
             "CPU in use, %"]]  # fmt: skip
    for case in cases:
        n, rate = case["replicas"], mean(case, "answers_per_s")
        times_one = "" if n == 1 else formatted(ratio(one, case, "answers_per_s"), "{:.2f}")
        busiest = max(each["busy_percent"] for each in case["seeds"])
        rows.append([
            str(n), formatted(rate, "{:.1f}"), f"{100 * rate.mean / (n * most):.0f}", times_one,
            f"{TARGETS[n]:g}" if n in TARGETS else "",
            f"{busiest:.0f}" + (" (too busy: cores may be the limit)" * (busiest > BUSIEST)),
        ])  # fmt: skip
    return markdown(rows)


# ---- what a router knows


def ages(seconds: float) -> Mapping[str, float]:
    """Milliseconds that have passed since a replica's report, whenever a router goes by it."""
    with front("ray", 2, SLOWDOWN, KINDS["ray"].routers.index("least_tokens")) as url:
        answers(url, 2, seconds)
        found: Mapping[str, float] = get(f"{url}/stats")["report_age_ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PAGE.module}", description="What replicas give, and a router knows."
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of each number of replicas (default: 3)")
    add("--seconds", type=float, default=8, help="of counting answers (default: 8)")
    add("--slowdown", type=float, default=SLOWDOWN, help=f"(default: {SLOWDOWN:g})")
    add("--out", type=Path, default=Path("runs") / PAGE.name, help="folder")
    options = parser.parse_args()
    cases = scaling(options.rounds, options.seconds, options.slowdown)
    age = ages(options.seconds)
    body = "\n\n".join([
        "## Plain answers a second",
        scaling_table(cases, options.slowdown),
        "## What a router knows",
        "When `least_tokens` chooses, a replica's report is "
        + ", ".join(f"{name} {value:.0f} ms" for name, value in age.items()) + " old.",
    ])  # fmt: skip
    told_of = (
        f"mode dynamic, {ROWS} rows a replica, the fake engine slowed down by {options.slowdown:g};"
        f" {SHORTEST} to {LONGEST} tokens an answer, {CLIENTS} clients a replica; means of "
        f"{options.rounds} rounds ± half of a 95% t interval"
    )
    result = {"scaling": cases, "report_age_ms": dict(age)}
    write(PAGE, options.out, told_of, body, None, result)


if __name__ == "__main__":
    run(main)
