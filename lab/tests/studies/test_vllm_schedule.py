"""lab.studies.vllm_schedule without vLLM: our side, the kinds of difference, and the table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lab.studies import vllm_schedule
from lab.studies.vllm_schedule import Limits, Step, compare, draw, our_schedule
from tests.programs import ran

FEW = Limits("few blocks, chunks", rows=8, token_budget=24, kv_blocks=24)


def test_a_schedule_has_joining_and_preempted_requests_and_computed_tokens() -> None:
    trace = draw(0, 30)
    assert trace == draw(0, 30) != draw(1, 30)
    assert all(len(d.prompt) + len(d.completion) <= vllm_schedule.LONGEST for d in trace)
    steps = our_schedule(FEW, trace)
    joined = [request for step in steps for request in step.admitted]
    preempted = [request for step in steps for request in step.preempted]
    assert {*joined} == {*range(30)} and len(joined) == 30 + len(preempted) > 30
    assert not any(step.admitted and step.preempted for step in steps)
    assert max(sum(step.chunks.values()) for step in steps) == 24
    cached = our_schedule(FEW._replace(caching=True), trace)
    assert sum(sum(step.cached.values()) for step in cached) > 200


@pytest.mark.parametrize(("plant", "kind"), [
    (lambda step: step._replace(preempted={*step.preempted, 99}), "preempted"),
    (lambda step: step._replace(admitted=set()), "admitted"),
    (lambda step: step._replace(cached={i: n + 16 for i, n in step.cached.items()}), "cached"),
    (lambda step: step._replace(chunks={i: n - 1 for i, n in step.chunks.items()}), "chunks"),
    (lambda step: step._replace(at=step.at + 1), "at"),
])  # fmt: skip
def test_a_planted_difference_is_named_and_placed(plant: Callable[[Step], Step], kind: str) -> None:
    steps = our_schedule(FEW, draw(0, 30))
    place = next(i for i, step in enumerate(steps) if step.admitted and i > 20)
    other = [*steps[:place], plant(steps[place]), *steps[place + 1 :]]
    assert compare(steps, steps) == (len(steps), "")
    assert compare(steps, other) == (place, kind)
    assert compare(steps, steps[:-1]) == (len(steps) - 1, "end")


def test_counts_are_summed_over_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of vLLM's scheduler ours, with a block more."""

    def other(limits: Limits, trace: Any) -> Any:
        return our_schedule(limits._replace(kv_blocks=25), trace)

    monkeypatch.setattr(vllm_schedule, "schedule_of_vllm", other)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("logging.disable", lambda level: None)  # other tests read logs
    case = FEW._asdict()
    seeds = [vllm_schedule.run(case, 40, seed) for seed in range(2)]
    [row] = vllm_schedule.sums([case | {"seeds": seeds}])
    [found] = row["seeds"]
    assert found["iterations"] == sum(seed["iterations"] for seed in seeds) > found["equal"] > 0
    assert found["kind"] == "preempted 2"


def test_the_clocks_of_both_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours counts picoseconds: beside a sum of floats every trace differed from the start."""

    class OneByOne:
        """A scheduler with what the study reads of vLLM's, one request at a time."""

        def __init__(self, limits: Limits) -> None:
            self.requests: dict[str, Any] = {}
            self.running: list[Any] = []
            self.waiting: list[Any] = []

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request
            self.waiting.append(request)

        def has_unfinished_requests(self) -> bool:
            return bool(self.running or self.waiting)

        def schedule(self) -> Any:
            if not self.running and self.waiting:
                self.running.append(self.waiting.pop(0))
            tokens = {}
            for each in self.running:
                tokens[each.request_id] = each.num_tokens - each.num_computed_tokens
                each.num_computed_tokens = each.num_tokens
            return SimpleNamespace(num_scheduled_tokens=tokens)

        def update_from_output(self, output: Any, sampled: Any) -> None:
            [request] = self.running
            request.num_tokens += 1
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self.running.clear()

    def request(name: str, prompt: list[int], most: int, *others: Any, **more: Any) -> Any:
        return SimpleNamespace(
            request_id=name, max_tokens=most, num_tokens=len(prompt), num_computed_tokens=0,
            num_output_tokens=0,
        )  # fmt: skip

    modules: dict[str, dict[str, Any]] = {
        "sampling_params": {"SamplingParams": lambda max_tokens, ignore_eos: max_tokens},
        "utils.hashing": {"sha256": None}, "v1.outputs": {"ModelRunnerOutput": lambda *parts: None},
        "v1.core.kv_cache_utils": {"get_request_block_hasher": None, "init_none_hash": id},
        "v1.request": {"Request": request}, "utils": {}, "v1": {}, "v1.core": {},
    }  # fmt: skip
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace(**content))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setattr(vllm_schedule, "vllm_scheduler", OneByOne)
    limits, trace = Limits("one row", 1, 256, 512), draw(0, 30)
    steps = vllm_schedule.schedule_of_vllm(limits, trace)
    assert compare(our_schedule(limits, trace), steps) == (len(steps), "")


def test_without_vllm_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = ran("lab.studies", "vllm_schedule", "--processes", "1", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"error: {vllm_schedule.MISSING}\n")
