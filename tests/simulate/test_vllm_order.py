"""simulate/vllm/vllm_order.py, on a scheduler that uses a queue as vLLM's does."""

from __future__ import annotations

import importlib
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client.runs import RunError
from generate.auto import build
from scheduling.policies import ORDERS
from simulate.vllm.agreement import agreement
from simulate.vllm.foreseen import settings_of
from simulate.vllm.recording import read
from simulate.vllm.traffic import Traffic
from tests.servers import ROOT
from tests.simulate.test_vllm_recorder import BLOCK, FakeScheduler, stand_in

BESIDE = ROOT / "simulate" / "vllm"


class FcfsQueue(deque[Any]):
    """vLLM's queue, as far as it is used."""

    add_request, pop_request = deque.append, deque.popleft


class Vllm(FakeScheduler):
    """Two rows and 64 tokens; skips requests that are blocked, and preempts on demand."""

    rows, budget = 2, 64

    def __init__(self, **changed: Any):
        super().__init__(**changed)
        self.cache_config.enable_prefix_caching = changed.get("caching", False)
        pool = SimpleNamespace(num_gpu_blocks=10_000, get_num_free_blocks=lambda: 10_000 - 1)
        self.cached: dict[str, int] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, get_computed_blocks=lambda r: (None, self.cached.get(r.request_id, 0))
        )
        self.scheduler_config.max_num_seqs = self.max_num_running_reqs = self.rows
        self.waiting: Any = FcfsQueue()
        self.blocked: set[str] = set()
        self.preempts = 0

    def add_request(self, request: Any) -> None:
        self.waiting.add_request(request)

    def give_up(self, request: Any) -> None:
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
        self.gave_up.append(request.request_id)

    def schedule(self) -> Any:
        left, tokens, preempted, skipped = self.budget, dict[str, int](), [], list[Any]()
        while self.preempts and self.running:
            self.preempts -= 1
            preempted.append(self.running.pop())
            preempted[-1].num_computed_tokens = 0
            self.waiting.prepend_request(preempted[-1])

        def compute(each: Any) -> None:
            nonlocal left
            wanted = each.num_prompt_tokens + each.made - each.num_computed_tokens
            n = tokens[each.request_id] = min(left, wanted)
            left -= n
            each.num_computed_tokens += n

        for each in self.running:
            if left:
                compute(each)
        while not preempted and left and self.waiting and len(self.running) < self.rows:
            each = self.waiting.peek_request()
            assert each is self.waiting.pop_request()
            if each.request_id in self.blocked:
                skipped.insert(0, each)
                continue
            each.num_computed_tokens = self.cached.get(each.request_id, 0)
            self.running.append(each)
            compute(each)
        if skipped:
            self.waiting.prepend_requests(skipped)
        gave_up, self.gave_up = self.gave_up, []
        return SimpleNamespace(
            num_scheduled_tokens=tokens, finished_req_ids=gave_up,
            preempted_req_ids=[each.request_id for each in preempted],
        )  # fmt: skip

    def update_from_output(self, output: Any) -> Any:
        answers = []
        for each in [r for r in self.running if r.request_id in output.num_scheduled_tokens]:
            if each.num_computed_tokens < each.num_prompt_tokens + each.made:
                continue
            each.made += 1
            if over := each.made == each.max_tokens:
                self.running.remove(each)
            answers.append(SimpleNamespace(
                request_id=each.request_id, new_token_ids=[7], finished=over, finish_reason="length"
            ))  # fmt: skip
        return {0: SimpleNamespace(outputs=answers)}


def request(name: str, prompt: int = 8, tokens: int = 2, **said: Any) -> Any:
    hashes = [name.encode() + bytes([k]) * 32 for k in range(prompt // BLOCK)]
    return SimpleNamespace(
        request_id=name, arrival_time=1000.0, num_prompt_tokens=prompt, max_tokens=tokens,
        prompt_token_ids=[0] * prompt, priority=0, num_computed_tokens=0, made=0,
        block_hashes=hashes, cache_salt=said.pop("cache_salt", None),
        sampling_params=SimpleNamespace(extra_args=said or None),
    )  # fmt: skip


class Clock:
    """Ticks 10 ms at each look, so that no two instants are equal."""

    now = 1000.0

    def time(self) -> float:
        self.now += 0.01
        return self.now


Made = Callable[..., Any]


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Made]:
    """Return a scheduler with an ORDER, whose module is its `module`."""
    stand_in(monkeypatch, Vllm, is_cpu=True, RequestQueue=ABC, FCFSRequestQueue=FcfsQueue)
    ours = ("vllm_order", "vllm_order_queue", "vllm_order_settings", "vllm_recorder")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(BESIDE))
    monkeypatch.setenv("RECORD_ITERATIONS", str(tmp_path / "vllm.jsonl"))

    def made(order: str, kind: str = "SyncOrderedScheduler", **changed: Any) -> Any:
        monkeypatch.setenv("ORDER", order)
        module = importlib.import_module("vllm_order")
        monkeypatch.setattr(sys.modules["vllm_recorder"], "time", Clock())
        scheduler = getattr(module, kind)(**changed)
        scheduler.module = sys.modules["vllm_order_queue"]
        schedulers.append(scheduler)
        return scheduler

    tables, schedulers = ORDERS.copy(), list[Any]()
    yield made
    for scheduler in schedulers:
        scheduler._file.close()
    ORDERS.clear()
    ORDERS.update(tables)
    for name in ours:
        sys.modules.pop(name, None)


def step(scheduler: Any) -> list[str]:
    """Serve one iteration; return the requests that it computes."""
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    return list(output.num_scheduled_tokens)


def joined(scheduler: Any, *requests: Any) -> str:
    """Serve requests to their ends; return their names as they joined."""
    for each in requests:
        scheduler.add_request(each)
    names: dict[str, None] = {}
    while scheduler.waiting or scheduler.running:
        names |= dict.fromkeys(step(scheduler))
    return " ".join(names)


def test_the_order_decides_who_joins(ordered: Made) -> None:
    lengths = {"a": 9, "b": 5, "c": 7, "d": 1}
    requests = [request(name, 8, n) for name, n in lengths.items()]
    assert joined(ordered("sjf"), *requests) == "d b c a"
    requests = [request(name, 8, n) for name, n in lengths.items()]
    assert joined(ordered("sjf --aging 1000", "OrderedScheduler"), *requests) == "a b c d"


def test_what_a_request_says_by_vllm_xargs(ordered: Made) -> None:
    said = [request("a", expected_tokens=90), request("b", expected_tokens="x"), request("c")]
    assert joined(ordered("sjf"), *said) == "b c a", "what is no number is ignored"
    said = [request("a", priority=3), request("b", priority=9), request("c", priority=1)]
    assert joined(ordered("priority"), *said) == "c b a", "9 is no level: the middle one"
    said = [request("a"), request("b", ttft_ms=900), request("c", ttft_ms=100)]
    assert joined(ordered("edf"), *said) == "c b a"
    said = [request("a", user="x"), request("b", user="x"), request("c", user="x")]
    assert joined(ordered("fair"), *said, request("d", cache_salt="y")) == "a d b c"


def test_a_predictor_of_ones_own(
    ordered: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "mine.py").write_text(
        "def length(ids, most):\n    return 100 - most\n\ndef wrong(ids, most):\n    return 1 / 0\n"
    )
    for name, order in ("length", "c b a"), ("wrong", "a b c"):
        monkeypatch.setenv("PREDICTOR", f"{tmp_path}/mine.py:{name}")
        requests = [request("a", 8, 3), request("b", 8, 4), request("c", 8, 5)]
        assert joined(ordered("sjf --prefill-weight 0"), *requests) == order
    assert [each.message for each in caplog.records] == [
        "PREDICTOR failed, max_tokens from now on: ZeroDivisionError: division by zero"
    ]


def random_requests(
    scheduler: Any, n: int, seed: int, preempting: float = 0.0, blocking: float = 0.0
) -> None:
    """Serve random requests, of which some give up."""
    chance, flying = random.Random(seed), list[Any]()
    for k in range(n):
        prompt, tokens = chance.randint(1, 90), chance.randint(1, 9)
        one = request(f"{k}", prompt, tokens, user=chance.choice("abc"), ttft_ms=chance.random())
        if scheduler.cache_config.enable_prefix_caching:
            scheduler.cached[one.request_id] = (prompt - 1) // BLOCK // 2 * BLOCK
        scheduler.add_request(one)
        flying.append(one)
        for _ in range(chance.randrange(9)):
            scheduler.preempts = int(chance.random() < preempting)
            if chance.random() < blocking:
                scheduler.blocked = {f"{chance.randrange(k + 1)}" for _ in range(9)}
            step(scheduler)
            flying = [each for each in flying if each.made < each.max_tokens]
            if flying and chance.random() < 0.05:
                scheduler.give_up(flying.pop(chance.randrange(len(flying))))
    scheduler.blocked, scheduler.preempts = set(), 0
    while scheduler.waiting or scheduler.running:
        step(scheduler)
    step(scheduler)


@pytest.mark.parametrize("order", ["sjf --aging 5", "hrrn --max-wait-s 1", "fair", "edf"])
@pytest.mark.parametrize("kind", ["OrderedScheduler", "SyncOrderedScheduler"])
def test_nothing_is_left_of_requests_that_are_over(order: str, kind: str, ordered: Made) -> None:
    """Finished, cancelled, preempted or skipped."""
    scheduler = ordered(order, kind, caching=True)
    random_requests(scheduler, 300, 1, preempting=0.2, blocking=0.3)
    queue = scheduler.waiting
    assert not (queue.mirrors or queue.requests or queue.running or len(queue))
    assert not queue._waiting.by_id and not list(queue) and not queue._failed


@pytest.mark.parametrize("order", [
    "fcfs", "sjf --aging 5", "hrrn", "fair --user-weights a=2", "edf", "priority"
])  # fmt: skip
def test_our_scheduler_plans_what_the_order_did_there(
    order: str, ordered: Made, tmp_path: Path
) -> None:
    random_requests(ordered(order), 300, 2)
    recording = read(tmp_path / "vllm.jsonl")
    list(recording.run())
    traffic = Traffic(recording)
    config = build("dynamic", settings_of(recording.head, traffic.longest, traffic.n_levels), {})
    assert str(agreement(recording, traffic, config)).startswith("Our scheduler plans all ")


def test_an_order_of_a_file_is_recognized_by_its_content(ordered: Made, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from scheduling.policies.base import Order\n\nclass Mine(Order): pass\n"
    )
    word = f"{tmp_path}/mine.py:Mine"
    joined(ordered(word), request("a"))
    head = read(tmp_path / "vllm.jsonl").head
    assert (
        settings_of(head.model_copy(update={"order": "there/mine.py:Mine"}), 9, 0)["order"] == word
    )
    with pytest.raises(
        RunError, match=r"ORDER='.*Mine', which is not loaded here; set EB_ORDER=FI"
    ):
        settings_of(head.model_copy(update={"order_sha256": "0" * 10}), 9, 0)


FAULTS = {
    "raise ValueError('too bad')": "ValueError: too bad",
    "raise SystemExit('bye')": "SystemExit: bye",
    "yield from [*queue.by_key.values()][:1] * 2": "names a request twice",
    "yield from ()": "it names none of 4 requests, and nothing runs",
    "yield 7": "AttributeError",
    "while True: pass": "OrderHangs: it has been running for more than 0 s",
    "\n        while 1:\n            try: 1\n            except BaseException: pass": "OrderHangs",
    "yield __import__('time').sleep(60)": "OrderHangs",
}


@pytest.mark.parametrize("body", FAULTS)
def test_an_order_that_fails_is_replaced_by_fcfs_and_the_log_says_so_once(
    body: str, ordered: Made, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from scheduling.policies.base import Order\n\nclass Mine(Order):\n"
        f"    def ordered(self, queue, view):\n        {body}\n        yield\n"
    )
    scheduler = ordered(f"{tmp_path}/mine.py:Mine")
    monkeypatch.setattr(scheduler.module, "LONGEST_S", 0.2)
    requests = [request(name) for name in "abcd"]
    assert joined(scheduler, *requests) == "a b c d"
    [record] = caplog.records
    assert record.levelno == logging.ERROR and FAULTS[body] in record.message
    assert "ORDER failed, first come, first served from now on: " in record.message
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0 and not scheduler.waiting.mirrors


@pytest.mark.parametrize("method", ["key", "arrive", "check"])
def test_an_order_that_cannot_place_a_request(
    method: str, ordered: Made, tmp_path: Path, caplog: Any
) -> None:
    """A NaN sorts nowhere."""
    (tmp_path / "mine.py").write_text(
        "from scheduling.policies.base import Order\n\nclass Mine(Order):\n    n = 0\n"
        f"    def {method}(self, *_):\n        type(self).n += 1\n"
        "        if type(self).n == 3: raise ValueError('no')\n        return -self.n\n"
    )
    scheduler = ordered(f"{tmp_path}/mine.py:Mine")
    names = joined(scheduler, *(request(name) for name in "abcd"))
    assert names == "a b c d" and len(caplog.records) == 1


def test_an_order_may_hold_requests_back_while_others_run(ordered: Made) -> None:
    """prefix: of two that begin alike one computes what both need."""
    scheduler = ordered("prefix", caching=True)
    first, second = request("a", 60, 3), request("b", 60, 3)
    second.block_hashes = first.block_hashes
    for each in (first, second, request("c", 60, 3)):
        scheduler.add_request(each)
    assert step(scheduler) == ["a", "c"]


def test_vllm_0_30_has_a_queue_of_skipped_requests(
    ordered: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vllm, "skipped_waiting", FcfsQueue(), raising=False)
    scheduler = ordered("sjf")
    scheduler.add_request(one := request("a", 8, 5))
    scheduler.add_request(request("b", 8, 9))
    scheduler.waiting.begin_pass()
    assert scheduler.waiting.pop_request() is one
    scheduler.skipped_waiting.prepend_requests([one])
    assert not scheduler.skipped_waiting and len(scheduler.waiting) == 2
    scheduler.waiting.end_pass()
    assert step(scheduler) == ["a", "b"]


def test_users_are_recorded_without_their_names(ordered: Made, tmp_path: Path) -> None:
    said = [request(name, user=name * 9) for name in "abc"]
    joined(ordered("fair --user-weights aaaaaaaaa=2"), *said, request("d", cache_salt="secret"))
    _, *lines = map(json.loads, (tmp_path / "vllm.jsonl").read_text().splitlines())
    users = [new[8] for line in lines for new in line["new"]]
    assert users[0] == "aaaaaaaaa", "the settings name that one"
    assert all(len(user) == 12 and {*user} <= {*"0123456789abcdef"} for user in users[1:])


REFUSED = {
    "srpt": "ORDER=srpt pauses running rows, and vLLM computes all that run; choose one that sorts "
    "what waits alone: fcfs, priority, sjf",
    "mlfq": "ORDER=mlfq pauses running rows",
    "sfj": "unknown order 'sfj' (did you mean sjf?); valid orders are fcfs, priority, sjf, hrrn",
    "sjf --agin 5": "unknown flag --agin (did you mean --aging?); sjf has --max-wait-s, ",
    "sjf --aging": "--aging '': input should be a valid number",
    "sjf --aging=-1": "--aging '-1': input should be greater than or equal to 0",
    "fair --user-weights x": "'x' is no weight; write NAME=WEIGHT",
    "priority --queue-policy 1:timeout_ms=9": "--queue-policy refuses requests, and vLLM's core",
    "nowhere.py:Mine": "nowhere.py:Mine cannot be used: there is no file",
    "sjf 'x": "No closing quotation; write sjf or 'sjf --aging 5'",
    "": "unknown order ''; valid orders are fcfs",
}


@pytest.mark.parametrize("order", REFUSED)
def test_an_order_that_vllm_cannot_have_is_refused_in_a_sentence(
    order: str, ordered: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception) as caught:
        ordered(order)
    assert REFUSED[order] in str(caught.value)


def test_vllm_loads_the_check_before_its_model(
    ordered: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a plugin: it must import nothing of vLLM."""
    [found] = distributions(path=[str(BESIDE)])
    [entry] = found.entry_points
    assert entry.group == "vllm.general_plugins"
    check = entry.load()
    assert not {"vllm_order", "vllm_order_queue"} & sys.modules.keys()
    check()
    monkeypatch.setenv("ORDER", "srpt")
    with pytest.raises(Exception, match="pauses running rows"):
        check()
    monkeypatch.setenv("ORDER", "sjf")
    monkeypatch.setenv("PREDICTOR", "nowhere.py:length")
    with pytest.raises(Exception, match=r"PREDICTOR=nowhere.py:length cannot be used: FileNotFou"):
        check()


def test_another_policy_of_vllm_is_refused(ordered: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Vllm.__init__

    def with_priorities(self: Any, **changed: Any) -> None:
        plain(self, **changed)
        self.scheduler_config.policy = "priority"

    monkeypatch.setattr(Vllm, "__init__", with_priorities)
    with pytest.raises(Exception, match="--scheduling-policy priority is an order, too; leave it"):
        ordered("sjf")


def test_the_folder_scheduling_is_all_that_it_needs_of_ours(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scheduling", tmp_path / "scheduling")
    shutil.copy(BESIDE / "vllm_order_settings.py", tmp_path)
    code = "import sys, vllm_order_settings as v; v.check(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"ORDER": "sjf --aging 5"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_the_order_is_asked_only_if_a_row_is_free(
    ordered: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = ordered("hrrn")
    for k in range(200):
        scheduler.add_request(request(f"{k}", 8, 1000))
    step(scheduler)
    monkeypatch.setattr(scheduler.waiting, "_view", None)
    for _ in range(9):
        step(scheduler)
    assert len(scheduler.waiting) == 198
