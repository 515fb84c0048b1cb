"""The real scheduler and policies in virtual time: every iteration takes exactly one second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling.inference import Inference, Iteration
from scheduling.policies import Policy
from scheduling.scheduler import Scheduler
from simulate import drive


@dataclass(frozen=True)
class Ask:
    """A request of `rows` prompts that arrives at `at`."""

    at: float
    prompt: int = 1
    tokens: int = 1
    rows: int = 1


@dataclass
class Run:
    groups: list[list[Inference]]
    iterations: list[tuple[float, Iteration]]
    scheduler: Scheduler

    @property
    def answered_at(self) -> list[float | None]:
        return [inference.answered_at for group in self.groups for inference in group]

    @property
    def batches(self) -> list[str]:
        """Who is in each iteration: "AB" two live rows, "Ab" the second is idle."""
        names = {id(i): chr(ord("A") + n) for n, i in enumerate(i for group in self.groups for i in group)}
        return [
            "".join(names[id(row.inference)].lower() if row.idle else names[id(row.inference)] for row in iteration.rows)
            for _, iteration in self.iterations
        ]


def make_scheduler(policy: Policy, **limits: Any) -> Scheduler:
    defaults = {"max_batch_size": 2, "token_budget": 100, "n_blocks": 100, "block_size": 4, "max_in_flight": 1000}
    return Scheduler(policy, **(defaults | limits))


def run(
    policy: Policy,
    asks: Sequence[Ask],
    check: Callable[[Scheduler, Iteration], None] = lambda scheduler, iteration: None,
    **limits: Any,
) -> Run:
    """Serve `asks` (in order of arrival) to the end. Fails if the scheduler stops making progress."""
    scheduler = make_scheduler(policy, **limits)
    groups = [[Inference([0] * ask.prompt, ask.tokens) for _ in range(ask.rows)] for ask in asks]
    result = Run(groups, [], scheduler)
    most = 2 * sum(ask.rows * (ask.prompt + ask.tokens) for ask in asks) + 100

    def planned(now: float, iteration: Iteration) -> None:
        nonlocal most
        most -= 1
        assert most > 0, "the scheduler makes no progress"
        check(scheduler, iteration)
        if iteration.rows:
            result.iterations.append((now, iteration))

    drive(scheduler, [(ask.at, group) for ask, group in zip(asks, groups)], lambda iteration: 1.0, planned=planned)
    return result
