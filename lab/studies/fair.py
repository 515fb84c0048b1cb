"""A greedy user and another one: how much each is served, and how much a limit leaves idle.

Service is counted as in VTC (Sheng et al., OSDI 2024): prompt tokens, and completion tokens twice.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from client.drawing import PALETTE, Look
from client.traces import Request
from lab.studies import virtual
from lab.studies.study import Against, Case, Cases, Panel, Study, Table, grid
from lab.studies.virtual import VIRTUAL, Capacity, Settings
from scheduling.inference import Inference, State
from scheduling.records import IterationRecord

LENGTHS = "exponential:50:200"
ROWS, BLOCKS = 8, 136  # which eight of the longest requests fill
W_PROMPT, W_COMPLETION = 1, 2  # weight of a token
MINUTE_S = 60.0
STEP_S = 2.0  # of a rate
USERS = ("greedy", "other")
VARIANTS = ("fcfs", "limit, requests", "limit, tokens", "fair")
# of each user the stretches in which it sends, as shares of the run, and the load that it sends
TRACES: dict[str, dict[str, tuple[Sequence[tuple[float, float]], float]]] = {
    "modest": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1)], 0.2)},
    "returns": {"greedy": ([(0, 1)], 1.0), "other": ([(0, 1 / 3), (2 / 3, 1)], 0.6)},
}


def capacity() -> Capacity:
    return virtual.capacity(ROWS, LENGTHS, BLOCKS)


def service_rate() -> float:
    """Return the weighted tokens a second that are served while requests always wait."""
    return W_PROMPT * capacity().prompt_tokens + W_COMPLETION * capacity().tokens


def settings_of(variant: str) -> Settings:
    """Return a variant's settings; a limit is a user's equal share of a minute's capacity."""
    share = MINUTE_S * capacity().requests / len(USERS)
    tokens = (capacity().prompt_tokens + capacity().tokens) / capacity().requests
    settings: dict[str, Settings] = {
        "fcfs": {},
        "limit, requests": {"user_requests_per_minute": round(share)},
        "limit, tokens": {"user_tokens_per_minute": round(share * tokens)},
        "fair": {"order": "fair"},
    }
    return settings[variant]


def bound(longest_prompt: int) -> int:
    """Return the bound of the difference of service between users that always wait (VTC, theorem
    4.4).
    """
    return 2 * max(W_PROMPT * longest_prompt, W_COMPLETION * 16 * BLOCKS)


def trace(name: str, seconds: float, seed: int) -> list[Request]:
    """Return the requests of both users in so many seconds, by time."""
    sent: list[Request] = []
    for k, (user, (stretches, load)) in enumerate(TRACES[name].items()):
        rate = load * capacity().requests
        for j, (begins, ends) in enumerate(stretches):
            data = virtual.data_of(LENGTHS, 1000 * seed + 10 * k + j)
            n = round(rate * (ends - begins) * seconds)
            sent += [
                request.model_copy(update={"at": request.at + begins * seconds, "user": user})
                for request in data.requests(n, f"poisson:{rate:g}", scaled=True)
            ]
    return sorted(sent, key=lambda request: request.at)


class Service:
    """Weighted tokens that each user was served, over time."""

    def __init__(self) -> None:
        self.at = [0.0]
        self.of = {user: [0.0] for user in USERS}

    def observe(self, record: IterationRecord) -> None:
        tokens = dict.fromkeys(USERS, 0)
        for row in record.iteration.rows:
            assert row.inference.user
            prompt = 0 if row.decodes else row.n_tokens
            tokens[row.inference.user] += W_PROMPT * prompt + W_COMPLETION * row.samples
        self.at.append(record.started_at + record.seconds)
        for user, n in tokens.items():
            self.of[user].append(self.of[user][-1] + n)

    def rates(self, user: str, seconds: float) -> list[float]:
        """Return a user's service in each STEP_S of so many seconds, in % of the capacity."""
        served = np.interp(np.arange(0, seconds, STEP_S), self.at, self.of[user])
        return [round(float(n), 1) for n in 100 * np.diff(served) / service_rate() / STEP_S]

    def largest_difference(self, inferences: Sequence[Inference]) -> float:
        """Return the largest difference of both users' service in any stretch in which both always
        waited.
        """
        answered = [i for i in inferences if i.state is State.FINISHED]
        stretches = [waits(i for i in answered if i.user == user) for user in USERS]
        more = np.subtract(self.of["greedy"], self.of["other"])
        largest = 0.0
        for (a, b), (c, d) in itertools.product(*stretches):
            if max(a, c) < min(b, d):
                first, last = np.searchsorted(self.at, [max(a, c), min(b, d)])
                largest = max(largest, float(np.ptp(more[first : last + 1])))
        return largest


def waits(inferences: Iterable[Inference]) -> list[tuple[float, float]]:
    """Return the stretches in which any of them waited, by time."""
    stretches: list[tuple[float, float]] = []
    for i in inferences:  # by arrival
        admitted = i.admitted_at or i.arrived_at
        if stretches and i.arrived_at <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(stretches[-1][1], admitted)
        else:
            stretches.append((i.arrived_at, admitted))
    return stretches


def run(case: Case, n: int, seed: int) -> dict[str, Any]:
    """Return measures of the time that n requests take."""
    seconds = n / capacity().requests
    settings = {"max_batch_size": ROWS} | virtual.pool(BLOCKS) | settings_of(case["variant"])
    service = Service()
    requests = trace(case["trace"], seconds, seed)
    inferences, _ = virtual.serve("dynamic", settings, requests, service.observe)
    greedy, other = ([i for i in inferences if i.user == user] for user in USERS)
    served = {user: float(np.interp(seconds, service.at, service.of[user])) for user in USERS}
    share = {user: 100 * served[user] / service_rate() / seconds for user in USERS}
    return {
        **share,
        "both": sum(share.values()),
        "refused": 100 * statistics.mean(i.error is not None for i in greedy),
        **virtual.mean_and_p99(other),
        "apart": service.largest_difference(inferences),
        "longest_prompt": max(len(i.prompt_ids) for i in inferences),
        "rates": {user: service.rates(user, seconds) for user in USERS},
    }


def text(cases: Cases) -> str:
    longest = max(seed["longest_prompt"] for case in cases for seed in case["seeds"])
    return (
        "Service counts prompt tokens once and completion tokens twice, as in VTC. Capacity is the "
        "service that `fcfs` gives in all while requests always wait. The greedy user sends "
        "requests for 100% of it. Trace `modest`: the other user sends for 20%. Trace `returns`: "
        "it sends for 60%, pauses in the second third of the time, and returns.\n\n"
        "With `limit`, a user may use half of a minute's capacity in each minute; requests beyond "
        "that are refused, and not sent again. `fair` is `--order fair`, for which VTC's bound is "
        f"{bound(longest):,} weighted tokens here while both users have waiting requests."
    )


STUDY = Study(
    name="fair",
    title="A greedy user and another one",
    question="How much service does a user get beside a greedy one, and how much capacity does a "
    "limit leave idle?",
    source="the service of two users with waiting requests differs by at most 2 · max(longest "
    "prompt, 2 · tokens in the pool), and limits waste capacity (VTC, Sheng et al., OSDI 2024)",
    workload=f"two users, as long as {{n}} requests take, `--lengths {LENGTHS}`, {ROWS} rows, "
    f"{{seeds}} seeds, {VIRTUAL}",
    requests=13_000,
    cases=grid(trace=TRACES, variant=VARIANTS),
    run=run,
    measures={
        "greedy": ("greedy user: % of capacity", "{:.1f}"),
        "other": ("other user: % of capacity", "{:.1f}"),
        "both": ("both users: % of capacity", "{:.1f}"),
        "refused": ("greedy user: refused, %", "{:.1f}"),
        "mean_s": ("other user: latency mean, s", "{:.2f}"),
        "p99_s": ("other user: latency p99, s", "{:.2f}"),
        "apart": ("largest difference while both wait, tokens", "{:,.0f}"),
    },
    text=text,
    tables=[Table(("trace", "variant"), against=[Against({"variant": "fcfs"}, ["mean_s"])])],
    figure="Service of both users over time, the other user's latency, and the difference of "
    "service",
    panels=[
        *(
            Panel(f"{trace}: {variant}", "service, % of capacity", "rates", xlabel="time, s",
                  where={"trace": trace, "variant": variant}, step=STEP_S)
            for trace, variant in itertools.product(TRACES, ("fcfs", "limit, tokens", "fair"))
        ),
        Panel("other user: mean latency", "latency mean, s", "mean_s", "trace", log=True),
        Panel("other user: p99 latency", "latency p99, s", "p99_s", "trace", log=True),
        Panel("difference while both wait", "weighted tokens", "apart", "trace", log=True),
    ],
    looks={
        name: Look(PALETTE[i], "-", "o") for name, i in zip((*VARIANTS, *USERS), (0, 2, 4, 3, 1, 5))
    },
)  # fmt: skip
