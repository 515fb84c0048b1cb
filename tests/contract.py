"""The contract of every policy, order and victim, and a program that holds a user's own to it:

    ./test.sh --policy FILE.py[:NAME]

It says in a sentence what is violated, and shows the smallest schedule found that violates it.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from textwrap import indent
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from generate.auto import build
from generate.fake import FakeGenerator
from scheduling.adapters import Adapters
from scheduling.errors import InvalidRequest, ServingError
from scheduling.inference import Inference, Iteration, State
from scheduling.policies import Dynamic, Fcfs, Order, Policy, Priority, Victim, View
from scheduling.policies.victims import NEWEST
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from scheduling.user_policies import FAULTS, PROBLEMS, SOURCES, reason
from server.request import Request
from server.serving import Server
from simulate.replay import replay_file
from tests.virtual import Ask, any_asks, any_of, run

LONGEST = -(-(30 + 12) // 4)  # blocks of the longest request below
ASKS = any_asks(25)
LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "rows": st.integers(1, 6),
    "budget": st.integers(1, 40),
    "spare_blocks": st.integers(0, 40),
}


def serve_within_limits(
    policy: Policy, order: Order, asks: Sequence[Ask], *, rows: int, budget: int, spare_blocks: int,
    preserve_ordering: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Serve `asks` in virtual time, an iteration per second. Raises AssertionError with the
    sentence that is violated, and what the scheduler raises of an impossible plan.
    """
    seen_running: set[int] = set()
    prompts_computed: Counter[int] = Counter()
    adapters: Adapters | None = options.get("adapters")
    loaded: dict[int, str] = {}  # by slot of the engine
    device: dict[int, dict[int, Any]] = defaultdict(dict)  # the tokens of each KV block, by place

    def check(scheduler: Scheduler, iteration: Iteration) -> None:
        running, pool = scheduler.running, scheduler.pool
        assert len(iteration.rows) <= policy.max_rows(rows), "a batch has more than max_rows rows"
        assert order.preemptive or len(running) <= policy.max_rows(rows), "too many run"
        assert len(iteration.rows) <= len(running)
        prefill = [row for row in iteration.rows if not row.decodes]
        assert sum(row.n_tokens for row in prefill) <= budget, "prompts exceed the token budget"
        for row in prefill:
            end = min(row.start + row.n_tokens, len(row.inference.prompt_ids))
            prompts_computed[row.inference.id] += max(0, end - row.start - row.recomputed)
        for row in iteration.rows:
            ids, end = row.inference.prompt_ids, row.start + row.n_tokens
            tokens = [(ids[0], min(p, len(ids) - 1), p, row.inference.adapter) for p in range(end)]
            for p in range(row.start, end if row.blocks else 0):
                device[row.blocks[p // 4]][p % 4] = tokens[p]
            held = [device[row.blocks[p // 4]][p % 4] for p in range(end if row.blocks else 0)]
            assert held in ([], tokens), "a row reads the keys and values of other tokens"
            written = row.blocks[row.start // 4 : (row.start + row.n_tokens - 1) // 4 + 1]
            shared = any(pool.references[block] != 1 or block in pool._keys for block in written)
            assert not shared, "a KV block that is shared, or can be found, is written to"
            assert row.idle <= policy.request_level, "a row is idle, though request_level is False"
            assert not row.idle or not getattr(policy, "compact_batches", False)
        owned = Counter(block for inference in running.values() for block in inference.blocks)
        assert owned == {block: n for block, n in enumerate(pool.references) if n}
        assert len(owned) + pool.free_blocks == pool.n_blocks, "KV blocks were lost"
        if adapters is not None:
            names = {inference.adapter for inference in running.values()}
            assert len(names - adapters._uncounted) <= adapters._most, "adapters without slots"
            loaded.update(iteration.loads)
            slots = [adapters.slots.get(row.inference.adapter, -1) for row in iteration.rows]
            assert slots == sorted(slots), "rows of one adapter are apart"
            for row, slot in zip(iteration.rows, slots):
                assert loaded.get(slot, "") == row.inference.adapter, "an adapter is not loaded"
        if policy.request_level and seen_running & set(running):
            assert set(running) <= seen_running, "a request joined a batch that had begun"
        seen_running.clear()
        seen_running.update(running)

    n_blocks = (12 * LONGEST if policy.request_level else LONGEST) + spare_blocks
    options |= {"order": order, "max_batch_size": rows, "token_budget": budget}
    options |= {"n_blocks": n_blocks, "preserve_ordering": preserve_ordering}
    served = run(policy, asks, check, **options)
    groups = []
    for group in served.groups:
        too_many = policy.request_level and len(group) > policy.max_rows(rows)
        if too_many or (isinstance(order, Priority) and not _is_a_level(order, group[0])):
            assert all(isinstance(inference.error, InvalidRequest) for inference in group)
        else:
            groups.append(group)
    inferences = [inference for group in groups for inference in group]
    for inference in inferences:
        assert inference.state is State.FINISHED, "a request was never finished"
        assert inference.admitted_at is not None and inference.answered_at is not None
        assert len(inference.tokens) == len(inference.token_times) == inference.num_tokens
        assert inference.arrived_at <= inference.admitted_at < inference.token_times[0]
        assert inference.token_times == sorted(inference.token_times)
        assert inference.token_times[-1] <= inference.answered_at
        computed = prompts_computed[inference.id] + inference.cached_tokens
        assert computed == len(inference.prompt_ids), "a prompt was computed in part, or twice"
        if not policy.request_level and not preserve_ordering:
            assert inference.answered_at == inference.token_times[-1], "an answer was held back"
    answered = [inference.answered_at or 0.0 for inference in inferences]
    assert not preserve_ordering or answered == sorted(answered), "an answer overtook another"
    admitted = [inference.admitted_at or 0.0 for inference in inferences]
    longest_s = 0.0  # for which one that lacks a slot may be overtaken
    if adapters is not None and adapters._rule in ("skip", "drain"):
        longest_s = math.inf if adapters._max_wait_s is None else adapters._max_wait_s
    overtaken = any(
        later < first and early.arrived_at <= later - longest_s
        for (early, first), (_, later) in combinations(zip(inferences, admitted), 2)
    )
    assert not (order.in_order and policy.in_order and overtaken), (
        "a request was admitted before an earlier one; if that is meant, say in_order = False"
    )
    for group in groups if policy.request_level else ():
        assert len({inference.admitted_at for inference in group}) == 1, "a request was split"


def _is_a_level(order: Priority, inference: Inference) -> bool:
    default = order.default_priority_level or (order.priority_levels + 1) // 2
    return 1 <= (inference.priority or default) <= order.priority_levels


# ---- the program


class Violation(Exception):
    """A rule of the contract that a user's own class violates."""


@dataclass(frozen=True)
class Twice(Victim):
    """A victim that is asked twice. Raises ValueError if its answers differ."""

    of: Victim

    def choose(self, rows: Sequence[Inference], view: View) -> Inference:
        chosen = self.of.choose(rows, view)
        if self.of.choose(rows, view) is not chosen:
            raise ValueError("asked twice about the same rows, it chooses two of them")
        return chosen


def any_schedule(
    policy: st.SearchStrategy[Policy],
    order: st.SearchStrategy[Order],
    victim: st.SearchStrategy[Twice | None],
) -> None:
    """Serve random workloads. Raises Violation with the smallest one that violates a rule."""
    last: dict[str, Any] = {}

    @settings(max_examples=300, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
              suppress_health_check=list(HealthCheck), report_multiple_bugs=False)  # fmt: skip
    @given(policy=policy, order=order, victim=victim, asks=ASKS, **LIMITS)
    def serve(**drawn: Any) -> None:
        last.update(drawn)
        serve_within_limits(**drawn)

    try:
        serve()
    except FAULTS as error:
        rules = last["policy"], last["order"], getattr(last["victim"], "of", None)
        what = reason(error, *map(type, rules)) or str(error)
        raise Violation(f"{what}\n\n{_schedule(**last)}") from None


def _schedule(
    policy: Policy, order: Order, victim: Twice | None, asks: Sequence[Ask], **limits: int
) -> str:
    whose = f", {victim.of}" if victim else ""
    lines = [
        f"the smallest schedule found: {policy}, {order}{whose}; {limits['rows']} rows, a token "
        f"budget of "
        f"{limits['budget']}, {limits['spare_blocks']} spare KV blocks of 4 tokens"
    ]
    for number, ask in enumerate(asks):
        parts = [f"{ask.rows} × (prompt of {ask.prompt}, completion of {ask.tokens} tokens)"]
        parts += [f"{ask.n} completions of each prompt"] if ask.n > 1 else []
        parts += [f"user {ask.user}"] if ask.user else []
        lines.append(f"  request {number} at {ask.at:g} s: {', '.join(parts)}")
    return "\n".join(lines)


def texts(policy: Policy, order: Order, victim: Victim) -> None:
    """Serve a small model. Raises Violation if a text differs from the engine's without a cache."""
    from generate.naive import NaiveGenerator  # torch takes seconds to import
    from tests import oracle

    model = oracle.tiny_model()
    expected = oracle.workload(12, Sampling())
    oracle.serve(Dynamic(), NaiveGenerator(model, oracle.N_VOCAB), expected)
    actual = oracle.workload(12, Sampling())
    oracle.serve(policy, oracle.engine(model, 80, 4), actual, order=order, victim=victim)
    for i, (one, other) in enumerate(zip(expected, actual)):
        if one.tokens != other.tokens:
            raise Violation(f"the text of request {i} differs from that without batching")


def live(mode: str, **settings: Any) -> None:
    """Raise Violation if virtual time does not come to the iterations of a recorded server."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/calls.jsonl"
        flags = {"model": "fake", "max_batch_size": 4, "record": path, **settings}
        server = Server(build(mode, flags, {}), lambda *_: FakeGenerator())

        def ask(thread: int) -> None:
            for i in range(10):
                prompts = [list(range(97, 98 + (3 * i + thread) % 20))]
                group = server.group(Request(prompts, 1 + (5 * i + thread) % 9))
                try:
                    server.manager.enqueue(group)
                except ServingError as refusal:
                    raise Violation(str(refusal)) from None
                for inference in group if i % 2 else ():
                    inference.done.wait(10)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
        server.close()
        result = replay_file(path)
    if result.first_difference is not None:
        raise Violation(f"live and virtual time differ: {result.first_difference}")


def hold(kind: type[Policy] | type[Order] | type[Victim]) -> bool:
    """Print which rules a class keeps, up to the first that it violates; return whether it does."""
    word = SOURCES[kind].word
    print(word)
    demand = Dynamic(kv_reservation="demand", watermark=0.0)
    policies: st.SearchStrategy[Any] = st.just(demand)
    orders: st.SearchStrategy[Any] = st.just(Fcfs())
    victims: st.SearchStrategy[Twice | None] = st.none()
    policy: Policy = Dynamic()
    order: Order = Fcfs()
    victim: Victim = NEWEST
    flags: dict[str, Any] = {"mode": "dynamic"}
    if issubclass(kind, Policy):
        policies, policy, flags = any_of(kind), kind(), {"mode": word}
    elif issubclass(kind, Order):
        policies = st.sampled_from([Dynamic(), Dynamic(kv_reservation="demand")])
        orders, order, flags = any_of(kind), kind(), flags | {"order": word}
    else:  # blocks for two requests, so that rows are preempted
        victims, policy, victim = any_of(kind).map(Twice), demand, kind()
        flags |= {"victim": word, "kv_reservation": "demand", "watermark": 0.0}
        flags |= {"max_model_len": 40, "block_size": 4, "kv_cache": "16blocks"}
    rules: dict[str, Callable[[], None]] = {
        "any workload is served once, within all limits": lambda: any_schedule(
            policies, orders, victims
        ),
        "texts are those without batching": lambda: texts(policy, order, victim),
        "live and virtual time make the same iterations": lambda: live(**flags),
    }
    for rule, check in rules.items():
        try:
            check()
            print(f"  holds     {rule}", flush=True)
        except FAULTS as error:
            violation = error if isinstance(error, Violation) else reason(error, kind)
            print(f"  VIOLATED  {rule}:\n{indent(str(violation), ' ' * 12)}", flush=True)
            return True  # the rules after it are violated for the same reason
    return False


def main() -> int:
    """Hold the classes that the command line names to the contract; return the exit status."""
    logging.disable()
    if not SOURCES and not PROBLEMS:
        print("error: name a file:  ./test.sh --policy FILE.py[:NAME]", file=sys.stderr)
        return 2
    for problem in PROBLEMS.values():
        print(f"error: {problem}", file=sys.stderr)
    violated = [hold(kind) for kind in list(SOURCES)]
    return 2 if PROBLEMS else int(any(violated))


if __name__ == "__main__":
    sys.exit(main())
