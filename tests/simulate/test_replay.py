"""A recorded server's calls, made once more on a scheduler of its own: the same iterations, row by
row, in every mode, order and memory setting. (What a recording's file may look like is in
test_recordings.)
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from generate.auto import build
from generate.fake import FakeGenerator
from generate.forced import ForcedAcceptance
from scheduling.errors import ServingError
from scheduling.inference import Generator, Inference, Iteration
from scheduling.policies import ORDERS, VICTIMS
from scheduling.records import IterationRecord
from scheduling.scheduler import Scheduler
from server.api.rendering import renderer_of
from server.engine import LocalEngine
from server.request import Request
from simulate.replay import replay_file
from tests.counts import ALL, SOME_MODES

SMALL = {
    "model": "fake",
    "max_batch_size": 4,
    "max_waiting": 6,
    "max_model_len": 64,
    "block_size": 4,
    "kv_cache": "16blocks",  # as many as one request may need: rows are in each other's way
    "token_budget": 16,
}
CLIENTS, REQUESTS = 4, 12  # of each client


class Witness:
    """An observer that keeps the rows of every iteration, and counts events by name."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, int]]] = []
        self.seen: Counter[str] = Counter()

    def iteration(self, record: IterationRecord) -> None:
        rows = record.iteration.rows
        self.rows.append([(row.inference.id, row.start) for row in rows])
        self.seen["preempted"] += record.iteration.preempted
        self.seen["chunk"] += any(not row.samples for row in rows)
        self.seen["idle"] += any(row.idle for row in rows)
        self.seen["padding"] += record.iteration.padding
        self.seen["loaded"] += len(record.iteration.loads)

    def answered(self, inference: Inference) -> None:
        self.seen[inference.error.code if inference.error else inference.finish_reason] += 1
        self.seen["found" if inference.leader is None else "shared"] += inference.cached_tokens
        self.seen["verified"] += inference.drafts.verified
        self.seen["paused"] += inference.interruptions.paused_s > 0


def random_request(server: LocalEngine, draw: random.Random) -> list[Inference]:
    """Draw groups, alike prompts, several completions, stop strings, deadlines, levels, streams."""
    begin = list(range(97, 97 + draw.choice([0, 9, 20])))
    prompts = [
        begin + [draw.randrange(97, 123) for _ in range(draw.randint(1, 12))]
        for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    request = Request(
        prompts, draw.randint(0, 24), seed=draw.choice([None, 7]),
        timeout_s=draw.choice([None, None, None, 0.002, 0.01]),
        stop=draw.choice([None, ["t", "e", "na", "\0\0\0"]]),
        user=draw.choice([None, "ann", "bob"]),
        priority=draw.choice([0, 1, 2, 3]) if server.config.order == "priority" else 0,
        queue_timeout_s=draw.choice([None, None, None, None, 0.002]), n=draw.choice([1, 1, 2, 3]),
    )  # fmt: skip
    group, follows = renderer_of(server, request).group, draw.random() < 0.3
    adapter = draw.choice(["", *server.config.adapters])
    for member in group:
        member.adapter = adapter
        if follows:  # as server/http/completions.py has it
            member.listener, member.streamed = lambda event: None, True
    return [*group]


def forget_idle_adapters(scheduler: Scheduler) -> None:
    in_flight = {inference.adapter for inference in scheduler.in_flight()}
    for name in {*scheduler.adapters.slots} - in_flight if scheduler.adapters else ():
        scheduler.forget_adapter(name)


def serve(path: Path, mode: str, settings: dict[str, Any], n_blocks: int | None = None) -> Witness:
    """Record a real server of clients that wait, leave or are refused; some iterations fail."""
    begun = threading.Semaphore(0)
    witness = Witness()

    def load(*config: Any) -> Generator:
        for _ in range(CLIENTS):
            begun.acquire()
        fake = FakeGenerator(sleep=lambda _: time.sleep(1e-4))
        generated = itertools.count(1)

        def generate(iteration: Iteration) -> list[int]:
            if next(generated) % 41 == 0:
                raise RuntimeError("a fault that was asked for")
            return fake.generate(iteration)

        return ForcedAcceptance(generate, [0.6], n_blocks)

    def client(seed: int) -> None:
        draw = random.Random(seed)
        unanswered: list[Inference] = []
        for i in range(REQUESTS):
            group = random_request(server, draw)
            try:
                manager.enqueue(group)
                unanswered += group
            except ServingError as refusal:
                witness.seen[f"refused: {refusal.code}"] += 1
            if i == 1:
                begun.release()
            match draw.randrange(12):
                case 0 | 1 as later:
                    time.sleep(0.001 * later)
                    manager.cancel(group)
                case 2:
                    manager.forget_prefixes()
                    manager.inspect(forget_idle_adapters)
                case 3 | 4 | 5 if i > 1:
                    wait_for(unanswered)
        wait_for(unanswered)

    def wait_for(unanswered: list[Inference]) -> None:
        for inference in unanswered:
            while not inference.done.wait(0.002):
                manager.expire()
        unanswered.clear()

    server = LocalEngine(build(mode, SMALL | settings | {"record": str(path)}, {}), load)
    manager = server.manager
    manager.observe(witness)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    server.close()
    return witness


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_replayed(path: Path, witness: Witness) -> None:
    """All that the server ran is recorded, and comes again."""
    recorded = [line["rows"] for line in lines_of(path) if "rows" in line]
    assert [[tuple(row[:2]) for row in rows] for rows in recorded] == witness.rows
    result = replay_file(str(path))
    assert result.first_difference is None
    assert result.equal == result.iterations == len(witness.rows) > 5
    assert (result.recordings, result.unfinished) == (1, 0)


DEMAND: dict[str, Any] = {"kv_reservation": "demand"}
MEMORY = [{}, *(DEMAND | {"victim": victim} for victim in VICTIMS)]


@pytest.mark.parametrize("mode", SOME_MODES)
def test_every_iteration_of_a_recorded_server_comes_again(mode: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    orders = [name for name, kind in ORDERS.items() if mode == "dynamic" or not kind.preemptive]
    memories = (MEMORY if ALL else MEMORY[:2]) if mode == "dynamic" else MEMORY[:1]
    for order, memory in itertools.product(orders, memories):
        for caching in (True,) if order == "prefix" else (False, True):
            settings = {"order": order, "prefix_caching": caching} | memory
            path = tmp_path / f"{settings}.jsonl"
            witness = serve(path, mode, settings)
            assert_replayed(path, witness)
            seen += witness.seen
    ways = {"length", "stop", "cancelled", "deadline_passed", "generation_failed", "chunk"}
    ways |= {"refused: overloaded", "refused: invalid_request", "found", "shared"}
    ways |= {"preempted", "paused"} if mode == "dynamic" else set()
    ways |= {"idle"} if mode not in ("dynamic", "nobatch") else set()
    assert ways <= {*seen}


def case(mode: str, *ways: str, n_blocks: int | None = None, **settings: Any) -> tuple[Any, ...]:
    """A server, the blocks that its engine turns out to have, and what must come to pass."""
    return mode, settings, n_blocks, {*ways}


QUEUES = "1:timeout_ms=2,override=yes;2:timeout_ms=1,action=delay;3:max_size=2"
OTHERS = {
    "answers in order": case("dynamic", preserve_ordering=True),
    "answers in order, a batch at a time": case("static", preserve_ordering=True),
    "compact batches": case("static", compact_batches=True),
    "limits of users": case(
        "dynamic", "refused: rate_limit_exceeded",
        user_requests_per_minute=5, user_tokens_per_minute=400, max_waiting=64,  # none is too many
    ),
    "queue policies": case("dynamic", order="priority", queue_policy=QUEUES, max_wait_s=0.004),
    "aging": case("dynamic", order="sjf", aging=2000.0, max_wait_s=0.004),
    "noisy lengths": case("dynamic", order="sjf", length_predictor="noisy:1.5"),
    "fitted lengths": case("multibin", length_predictor="prompt", bins=3),
    "promotions": case(
        "dynamic", "paused", order="mlfq", mlfq_quantum=2, max_wait_s=0.003,
        max_batch_size=2, **DEMAND,
    ),
    "weights of users": case("multibin", order="fair", user_weights="ann=3,bob=0.7"),
    "decoded tokens count": case("dynamic", "chunk", budget_counts="all"),
    "prompts apart": case("dynamic", "paused", prefill="every:2"),
    "prompts by a limit": case("dynamic", "chunk", prefill="adaptive:0.5"),
    "draft tokens": case("dynamic", "verified", speculate=4, prefix_caching=True),
    "draft tokens and blocks on demand": case(
        "dynamic", "verified", "preempted", speculate=4, kv_reservation="demand",
    ),
    "many adapters": case(
        "dynamic", "loaded", "preempted", lora_random="4:1", max_loras=2, lora_policy="drain",
        max_wait_s=0.003, kv_reservation="demand", prefix_caching=True,
    ),
    "padding rows": case("dynamic", "padding", decoder_batch_sizes="4,2"),
    "preferred sizes": case("windowed", preferred_batch_sizes="3,4"),
    "the engine has fewer blocks": case("static", n_blocks=18, kv_cache="40blocks"),
    "pauses between iterations": case("dynamic", loop_interval_ms=1),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_so_they_do_with_every_other_setting_that_they_depend_on(name: str, tmp_path: Path) -> None:
    mode, settings, n_blocks, ways = OTHERS[name]
    witness = serve(tmp_path / "recording.jsonl", mode, settings, n_blocks)
    assert_replayed(tmp_path / "recording.jsonl", witness)
    assert ways <= {*witness.seen}


def test_so_they_do_of_an_earlier_recording_with_draft_tokens(tmp_path: Path) -> None:
    """It has `speculate` as a text, and beside each number of drafts how many tokens matched."""
    witness = serve(path := tmp_path / "recording.jsonl", "dynamic", {"speculate": 4})
    first, *rest = lines_of(path)
    first["settings"] |= {"speculate": "4", "draft": "ngram"}
    for line in rest:
        if "drafts" in line:
            line["drafts"] = {id_: [n, 3] for id_, n in line["drafts"].items()}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (first, *rest)))
    assert_replayed(path, witness)
    assert witness.seen["verified"] > 5
