"""The real scheduler and policies in virtual time: every iteration takes exactly one second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from generate.auto import build
from scheduling.building import build_group, features
from scheduling.inference import Drafter, Inference, Iteration, Row, Slo
from scheduling.policies import MODES, ORDERS, VICTIMS, Fcfs, Limits, Order, Policy
from scheduling.prefix_cache import PrefixCache, block_keys
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from scheduling.speculation import Speculation
from simulate import any_ids, drive
from simulate.costs import FAKE
from simulate.server import SimulatedServer

TEXTS: dict[str, Sequence[str]] = {  # of settings that are text, what they may say
    "queue_policy": ["", "default:max_size=100;2:timeout_ms=5000,action=delay"],
    "user_weights": ["", "a=3"],
    "victim": [*VICTIMS],
    "prefill": ["mixed", "first", "last", "every:1", "every:3", "adaptive"],
}


def every_policy() -> list[Policy]:
    """Each mode's policy with its defaults, and with each of its choices another way."""
    found: list[Policy] = []
    for kind in MODES.values():
        types = get_type_hints(kind)
        found.append(kind())
        for each in fields(kind):
            if isinstance(each.default, bool):
                found.append(replace(kind(), **{each.name: not each.default}))
            elif isinstance(each.default, str):
                values = get_args(types[each.name]) or TEXTS.get(each.name, ())
                others = [value for value in values if value != each.default]
                found += [replace(kind(), **{each.name: value}) for value in others]
    return found


def any_policy() -> st.SearchStrategy[Policy]:
    """A policy of any mode with any settings, within the limits that its fields state."""
    return st.one_of([any_of(kind) for kind in MODES.values()])


def any_order() -> st.SearchStrategy[Order]:
    """Any order with any settings, within the limits that its fields state."""
    return st.one_of([any_of(kind) for kind in ORDERS.values()])


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """A policy or order with any settings within the limits that its fields state."""
    types = get_type_hints(kind)
    return st.builds(kind, **{field.name: _values(field, types) for field in fields(kind)})


def _values(setting: Field[Any], types: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Of a setting's type, within its limits."""
    limits, default = setting.metadata["limits"], setting.default
    least = limits.get("ge", limits.get("gt", 0) + 1)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, str):
        return st.sampled_from(get_args(types[setting.name]) or TEXTS[setting.name])
    if isinstance(default, tuple):
        return st.lists(st.integers(1, 4), max_size=2).map(tuple)
    if float in get_args(types[setting.name]):
        return st.none() | st.sampled_from([0.5, 3.0])
    if isinstance(default, float):
        most = limits.get("le", 0.99 * limits["lt"] if "lt" in limits else 2500.0)
        return st.sampled_from([default, float(least), most])
    few = st.integers(least, min(least + 7, limits.get("le", least + 7)))
    return few if default is not None else st.none() | few


@dataclass(frozen=True)
class Ask:
    """`rows` prompts that arrive at `at` and repeat `content`; None: they share no KV block."""

    at: float
    prompt: int = 1
    tokens: int = 1
    rows: int = 1
    content: int | None = None
    n: int = 1  # completions of each prompt
    user: str | None = None
    adapter: str = ""
    priority: int = 0
    seed: int = 0  # of the error that a predictor makes
    queue_timeout_s: float | None = None
    deadline: float | None = None
    streamed: bool = False
    prompt_only: bool = False  # its prompt alone: the one token is not shown, and has no KV slot
    slo: Slo = Slo()  # noqa: RUF009  (it is frozen)

    def group(self, block_size: int) -> list[Inference]:
        ids = [self.content or 0] * self.prompt
        keys = [] if self.content is None else block_keys(ids, block_size, adapter=self.adapter)
        how = [Sampling(seed=self.seed)] * (self.rows * self.n)
        return build_group(
            None, [ids] * self.rows, 1 if self.prompt_only else self.tokens, how,
            keys=[keys] * self.rows, adapter=self.adapter, deadline=self.deadline,
            streamed=self.streamed, user=self.user, priority=self.priority, slo=self.slo,
            queue_timeout_s=self.queue_timeout_s, prompt_only=self.prompt_only,
        )  # fmt: skip


def any_asks(most: int, least: int = 0, **fields: Any) -> st.SearchStrategy[list[Ask]]:
    """Requests in the order of their arrival. fields: strategies of an `Ask`'s, besides these."""
    usual = {
        "at": st.floats(0, 30).map(lambda at: round(at, 2)),
        "prompt": st.integers(1, 30),
        "tokens": st.integers(1, 12),
        "rows": st.integers(1, 3),
        "content": st.none() | st.integers(1, 2),
        "n": st.sampled_from([1, 1, 2, 4]),
        "user": st.sampled_from([None, "a", "b"]),
        "adapter": st.sampled_from(["", "a", "b", "c", "d"]),
        "priority": st.integers(0, 3),
        "seed": st.integers(0, 9),
        "prompt_only": st.sampled_from([False, False, False, True]),
    }
    asks = st.lists(st.builds(Ask, **usual | fields), min_size=least, max_size=most)
    return asks.map(lambda asks: sorted(asks, key=lambda ask: ask.at))


@dataclass
class ServedAsks:
    groups: list[list[Inference]]
    iterations: list[tuple[float, Iteration]]
    scheduler: Scheduler

    @property
    def inferences(self) -> list[Inference]:
        return [inference for group in self.groups for inference in group]

    @property
    def answered_at(self) -> list[float | None]:
        return [inference.answered_at for inference in self.inferences]

    @property
    def admitted_at(self) -> list[float | None]:
        return [inference.admitted_at for inference in self.inferences]

    @property
    def batches(self) -> list[str]:
        """Rows of each iteration: "AB" two live rows, "Ab" the second is idle."""
        names = {id(inference): chr(ord("A") + n) for n, inference in enumerate(self.inferences)}

        def letter(row: Row) -> str:
            name = names[id(row.inference)]
            return name.lower() if row.idle else name

        return ["".join(map(letter, iteration.rows)) for _, iteration in self.iterations]

    @property
    def chunks(self) -> list[list[int]]:
        """Tokens that each row of each iteration computes."""
        return [[row.n_tokens for row in iteration.rows] for _, iteration in self.iterations]


def make_scheduler(policy: Policy, **settings: Any) -> Scheduler:
    """Of two rows, a budget of 100 tokens and 100 blocks of 4, unless `settings` say otherwise: an
    order, n_blocks, a victim in place of the policy's, and what `Limits` and `features` take.
    """
    defaults = {"max_batch_size": 2, "token_budget": 100, "block_size": 4, "max_in_flight": 1000}
    order, n_blocks = settings.pop("order", Fcfs()), settings.pop("n_blocks", 100)
    named = VICTIMS[getattr(policy, "victim", "newest")]
    victim = settings.pop("victim", None) or named()
    theirs = {f.name: settings.pop(f.name) for f in fields(Limits) if f.name in settings}
    limits = Limits(**defaults | theirs)
    pool = PrefixCache(n_blocks, limits.block_size)
    drafts, adapters = settings.pop("speculate", 0), settings.pop("adapters", None)
    core = {"adapters": adapters, "speculation": Speculation(drafts) if drafts else None}
    attached = features(policy, order, **settings)
    return Scheduler(policy, order, limits, pool, attached, victim, **core)


def begun(policy: Policy, *inferences: Inference, steps: int = 1, **settings: Any) -> Scheduler:
    """A scheduler that has these inferences of one request, after so many iterations from 0 on."""
    scheduler = make_scheduler(policy, **settings)
    scheduler.enqueue(inferences, 0.0)
    for now in range(steps):
        step(scheduler, float(now))
    return scheduler


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[Iteration, list[Inference]]:
    """One iteration, and the requests that it answers; every row that samples gets token 7."""
    iteration, _ = scheduler.schedule(now)
    tokens = [7] * sum(row.samples for row in iteration.rows)
    return iteration, scheduler.apply(iteration, tokens, now + 1)


def run(
    policy: Policy, asks: Sequence[Ask],
    check: Callable[[Scheduler, Iteration], None] = lambda scheduler, iteration: None,
    seconds: Callable[[Iteration], float] = lambda iteration: 1.0,
    generate: Callable[[Iteration], Iterable[int]] = any_ids, drafter: Drafter | None = None,
    **limits: Any,
) -> ServedAsks:  # fmt: skip
    """Serve `asks` (in order of arrival) to the end. Fails if there is no progress, if KV blocks
    are lost, or if a row has a token without a KV slot. seconds: of an iteration.
    """
    scheduler = make_scheduler(policy, **limits)
    groups = [ask.group(scheduler.limits.block_size) for ask in asks]
    result = ServedAsks(groups, [], scheduler)
    most = 2 * sum(ask.rows * ask.n * (ask.prompt + ask.tokens) for ask in asks) + 100
    if scheduler.order.preemptive:  # what paused rows lose is computed again
        most *= 10

    def planned(now: float, iteration: Iteration) -> None:
        nonlocal most
        most -= 1
        assert most > 0, "the scheduler makes no progress"
        check(scheduler, iteration)
        for row in iteration.rows:
            each, end = row.inference, row.start + row.n_tokens
            alone = row.idle and not row.blocks  # without keys and values
            assert alone or end <= len(row.blocks) * scheduler.limits.block_size
            shown = 0 if each.prompt_only else len(each.tokens)
            assert end - len(row.drafts) <= len(each.prompt_ids) + shown, "a token without a place"
        if iteration.rows:
            result.iterations.append((now, iteration))

    arrivals = [(ask.at, group) for ask, group in zip(asks, groups)]
    drive(scheduler, arrivals, seconds, generate, planned, drafter)
    assert scheduler.pool.free_blocks == scheduler.pool.n_blocks, "KV blocks were not given back"
    return result


def simulated(mode: str = "dynamic") -> SimulatedServer:
    """A server without a model, on which no request is refused."""
    return SimulatedServer(mode, build(mode, {"model": "fake", "max_waiting": 10**6}, {}), FAKE)
