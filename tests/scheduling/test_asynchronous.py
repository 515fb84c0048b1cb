"""Plans one iteration ahead: the same texts and, but for rows wasted, the same iterations."""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from batching import BatchingManager
from generate.buffers import SampledIds
from model import GPT2
from scheduling.errors import Cancelled, DeadlinePassed, Draining, GenerationFailed
from scheduling.inference import CachedPrefix, Generator, Inference, Iteration, State, TokenEvent
from scheduling.policies import ORDERS, Dynamic, NoBatching, Policy, Static, Windowed
from scheduling.prefix_cache import block_keys
from scheduling.records import IterationRecord
from scheduling.sampling import Sampling, Scores
from server.asynchronous import AsynchronousManager
from simulate import PS, Loop
from simulate.asynchronous import AsynchronousReplica
from simulate.costs import Costs
from simulate.loop import END
from simulate.replica import Stretch
from tests.oracle import MAX_TOKENS, N_VOCAB, engine, workload
from tests.oracle import model as model  # a fixture
from tests.virtual import make_scheduler

PATIENCE_S = 20.0
DEMAND = Dynamic(kv_reservation="demand")
Iterations = list[list[tuple[int, int, int, bool]]]


class Late(Generator):
    """Ids that follow from all tokens before them, and are known when they are waited for."""

    def __init__(self) -> None:
        self.n_ahead = 0  # iterations launched while the one before was not waited for
        self.fails: set[int] = set()  # iterations, by number
        self.launching: Callable[[int], None] = lambda number: None
        self.before: Callable[[int], None] = lambda number: None  # a wait
        self._sampled: list[int] = []
        self._numbers = iter(range(10**6))

    def generate(self, iteration: Iteration) -> list[int]:
        return self.launch(iteration)()

    def launch(self, iteration: Iteration) -> Callable[[], list[int]]:
        number, last, sampled = next(self._numbers), self._sampled, list[int]()
        self.launching(number)
        self._sampled = sampled
        rows = [row for row in iteration.rows if row.samples]
        texts = [[row.inference.token(i) for i in range(row.start + row.n_tokens)] for row in rows]
        self.n_ahead += any(token < 0 for text in texts for token in text)
        assert min((token for text in texts for token in text[:-1]), default=0) >= 0

        def wait() -> list[int]:
            self.before(number)
            if number in self.fails:
                raise RuntimeError("on purpose")
            for text in texts:
                known = [token if token >= 0 else last[-1 - token] for token in text]
                sampled.append(zlib.crc32(array("q", known).tobytes()) % N_VOCAB)
            return sampled

        return wait


def served(
    kind: type[BatchingManager], policy: Policy, inferences: Sequence[Inference],
    generator: Generator | None = None,
    begins: Callable[[BatchingManager], None] = lambda manager: None, **limits: Any,
) -> tuple[list[list[int]], Iterations]:  # fmt: skip
    """Serve a burst; return the texts, and the rows of each iteration."""
    generator, begin = generator or Late(), threading.Event()
    iterations: Iterations = []

    class Rows:
        def iteration(self, record: IterationRecord) -> None:
            rows = record.iteration.rows
            iterations.append([(r.inference.id, r.start, r.n_tokens, r.idle) for r in rows])

        def answered(self, inference: Inference) -> None:
            assert not inference.tokens or inference.tokens[-1] >= 0
            assert inference.answered_at is not None
            assert inference.answered_at >= inference.token_times[-1]

    def load() -> Generator:
        assert begin.wait(PATIENCE_S)
        return generator

    defaults: dict[str, Any] = {"max_batch_size": 4, "token_budget": 24, "n_blocks": 60}
    manager = kind(make_scheduler(policy, **defaults | {"block_size": 4} | limits), load)
    manager.observe(Rows())
    for inference in inferences:
        manager.enqueue([inference])
    begins(manager)
    begin.set()
    for inference in inferences:
        assert inference.done.wait(PATIENCE_S)
        assert inference.state in (State.FINISHED, State.CANCELLED)
    manager.close()
    assert manager._iteration_started_at is None
    pool = manager._scheduler.pool
    assert pool.free_blocks == pool.n_blocks and not manager._scheduler.has_work
    assert manager._scheduler.completion_tokens == sum(len(each.tokens) for each in inferences)
    return [inference.tokens for inference in inferences], iterations


POLICIES = [NoBatching(), Static(), Windowed(), Dynamic(), DEMAND]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_texts_and_iterations_are_the_same(policy: Policy) -> None:
    # so few that requests are preempted
    blocks: dict[str, Any] = {"n_blocks": 15} if policy is DEMAND else {}
    late = Late()

    def inferences() -> list[Inference]:
        requests = workload(12, Sampling())
        for each in requests:
            each.prompt_ids[:8] = range(8)
            # named at the same time, too
            each.prefix = CachedPrefix(block_keys(each.prompt_ids, 4))
        return requests

    plain = served(BatchingManager, policy, inferences(), **blocks)
    assert served(AsynchronousManager, policy, inferences(), late, **blocks) == plain
    assert late.n_ahead > len(plain[1]) / 2


@pytest.mark.parametrize("policy", [Static(), DEMAND], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("order", ORDERS)
def test_texts_are_the_same_where_stop_strings_end_requests(policy: Policy, order: str) -> None:
    """Each end is known an iteration late: preempted, paused, held, streamed ones among them."""

    def inferences() -> list[Inference]:
        requests = workload(10, Sampling(), longest_prompt=14)
        for i, each in enumerate(requests):
            each.stop, each.streamed = lambda token: token % 5 == 0, i % 3 == 0
            each.user, each.priority = "ab"[i % 2], i % 3
            each.prefix = CachedPrefix(block_keys(each.prompt_ids, 4)) if i % 2 else None
        return requests

    limits: dict[str, Any] = {"n_blocks": 14, "preserve_ordering": True, "order": ORDERS[order]()}
    plain, _ = served(BatchingManager, policy, inferences(), **limits)
    texts, iterations = served(AsynchronousManager, policy, inferences(), **limits)
    assert texts == plain
    assert policy is not DEMAND or any(idle for rows in iterations for *_, idle in rows), "wasted"


def test_a_request_is_preempted_in_vain_that_its_last_token_has_stopped() -> None:
    def stop_at(last: int) -> Callable[[int], bool]:
        calls = count(1)
        return lambda token: next(calls) == last

    in_vain = 0
    for last in range(1, 12):
        preemptions = list[int]()
        for kind in (BatchingManager, AsynchronousManager):
            inferences = [Inference([i] * 4, 12) for i in range(2)]
            inferences[1].stop = stop_at(last)
            texts, _ = served(kind, DEMAND, inferences, n_blocks=5)
            assert [len(text) for text in texts] == [12, last]
            preemptions.append(inferences[1].interruptions.preemptions)
        in_vain += preemptions[0] < preemptions[1]
    assert in_vain


@pytest.mark.parametrize("path", ["plain", "kernels in one call"])
def test_the_engine_takes_ids_from_where_it_sampled_them(path: str, model: GPT2) -> None:
    """With penalties, log-probabilities of tokens, shared prefixes and too few blocks as well."""
    texts: list[Any] = []
    for kind in (BatchingManager, AsynchronousManager):
        inferences = workload(16, Sampling(temperature=0.8, top_k=40))
        for i, each in enumerate(inferences):
            each.prompt_ids[:8] = range(8)
            if i % 5 != 1:  # one with scores computes its whole prompt
                each.prefix = CachedPrefix(block_keys(each.prompt_ids, 4))
            if i % 5 == 0:
                each.sampling = replace(each.sampling, frequency_penalty=1.5)
            if i % 5 == 1:
                each.scores, each.stop = Scores(2, 1), lambda token: token % 6 == 0
        sampled = SampledIds(MAX_TOKENS, "cpu") if kind is AsynchronousManager else None
        generator = engine(model, 24, 4, path, sampled=sampled)
        texts.append(served(kind, DEMAND, inferences, generator, n_blocks=24)[0])
        scores = [each.scores for each in inferences if each.scores is not None]
        texts.append([[round(score.logprob, 3) for score in each.of] for each in scores])
    assert texts[:2] == texts[2:]


def test_a_failed_iteration_ends_what_was_launched_and_nothing_else() -> None:
    late = Late()
    late.fails = {2}
    scheduler = make_scheduler(Dynamic(), max_batch_size=4, block_size=4)
    manager = AsynchronousManager(scheduler, lambda: late)
    prompt = [1, 2, 3, 4, 5]
    doomed, later = [Inference(prompt, n) for n in (3, 9)], Inference(prompt, 5)
    for each in (*doomed, later):
        each.prefix = CachedPrefix(block_keys(prompt, 4))
    manager.enqueue(doomed)  # one of which lacks nothing but the third iteration's ids
    for each in doomed:
        assert each.done.wait(PATIENCE_S) and isinstance(each.error, GenerationFailed)
        assert len(each.tokens) == 2 and min(each.tokens) >= 0
        assert each.state is State.FAILED
    manager.enqueue([later])
    assert later.done.wait(PATIENCE_S) and len(later.tokens) == 5
    assert later.cached_tokens == 0, "what had a name may not have been computed"
    manager.close()


def once(begin: threading.Event, late: Late) -> Callable[[], Generator]:
    """Return a load of this generator, which waits."""

    def load() -> Generator:
        assert begin.wait(PATIENCE_S)
        return late

    return load


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_failed_iteration_counts_once(penalty: float) -> None:
    """The one that was planned after it has no row that anybody waits for: it failed as well where
    it waits for ids, and two failures ended the server.
    """
    late = Late()
    manager = AsynchronousManager(make_scheduler(Dynamic(), max_batch_size=4), lambda: late)
    numbers = [1, 0]  # of the iterations of the first and the second request
    for i in range(3):
        begin = next(late._numbers) + 1
        late.fails = {begin + numbers[i]} if i < 2 else set()
        one = Inference([1, 2], 6, Sampling(frequency_penalty=penalty))
        manager.enqueue([one])
        assert one.done.wait(PATIENCE_S)
        assert (one.error is None) == (i == 2), one.error
    assert manager.failure is None and manager._failures == []
    manager.close()


@pytest.mark.parametrize("kind", [BatchingManager, AsynchronousManager])
@pytest.mark.parametrize(
    ("policy", "more", "streamed"),
    [(Dynamic(), {"preserve_ordering": True}, False), (Static(compact_batches=True), {}, False),
     (Static(), {}, True)],
)  # fmt: skip
def test_an_answer_that_is_complete_does_not_fail_with_others(
    kind: type[BatchingManager], policy: Policy, more: dict[str, bool], streamed: bool
) -> None:
    """It waits for its turn, or for the end of its batch, or its row is idle until then."""
    late, begin = Late(), threading.Event()
    late.fails = {4}
    manager = kind(make_scheduler(policy, max_batch_size=4, **more), once(begin, late))
    first, second = Inference([1, 2], 5), Inference([3, 4], 2, streamed=streamed)
    for each in (first, second):
        manager.enqueue([each])
    begin.set()
    for each in (first, second):
        assert each.done.wait(PATIENCE_S)
    manager.close()
    assert first.state is State.FAILED and len(first.tokens) == 4
    assert second.state is State.FINISHED and len(second.tokens) == 2 and second.error is None
    assert second.answered_at is not None and second.answered_at >= second.token_times[-1]


def test_a_stream_whose_last_token_is_lost_leaves_its_batch() -> None:
    """Its row had no token to compute, and failed those that had lost nothing."""
    late, begin = Late(), threading.Event()
    late.fails = {0}
    scheduler = make_scheduler(Static(), max_batch_size=4, token_budget=2)
    manager = AsynchronousManager(scheduler, once(begin, late))
    asked = [Inference([97], 1, streamed=True), Inference([98] * 9, 2), Inference([99] * 5, 2)]
    manager.enqueue(asked)
    begin.set()
    for each in asked:
        assert each.done.wait(PATIENCE_S)
    manager.close()
    states = [each.state for each in asked]
    assert states == [State.FAILED, State.FAILED, State.FINISHED], "the last had no row yet"


def test_a_request_that_found_blocks_of_a_failed_iteration_fails_with_it() -> None:
    """It joined without a row, so it was in no iteration: their keys may not have been computed."""
    late, begin = Late(), threading.Event()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    keys = block_keys(prompt, 4)
    first, second = (Inference([*prompt], 6, prefix=CachedPrefix([*keys])) for _ in range(2))
    scheduler = make_scheduler(Dynamic(), max_batch_size=4, token_budget=4)
    manager = AsynchronousManager(scheduler, once(begin, late))
    late.fails = {0}
    late.launching = lambda number: None if number else manager.enqueue([second])
    manager.enqueue([first])
    begin.set()
    for each in (first, second):
        assert each.done.wait(PATIENCE_S)
    manager.close()
    assert second.error is not None or second.cached_tokens == 0


def paused() -> tuple[Late, threading.Event, threading.Event]:
    """A generator that waits in its third iteration, when it is there, and what lets it go on."""
    late, reached, go = Late(), threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 2:
            reached.set()
            assert go.wait(PATIENCE_S)

    late.before = before
    return late, reached, go


@pytest.mark.parametrize("policy", [Static(), Dynamic()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_a_cancelled_request_leaves_the_others_alone(policy: Policy, penalty: float) -> None:
    """It ends with the iteration that is computed then, also while a planned one waits for the ids
    that penalties count. One that lacks nothing but these ids is answered with them.
    """
    late, reached, go = paused()
    manager = AsynchronousManager(make_scheduler(policy, max_batch_size=4), lambda: late)
    leaves, other = Inference([1], 20), Inference([2], 8, Sampling(frequency_penalty=penalty))
    expires, whole = (Inference([3], n, deadline=manager.clock() + 0.05) for n in (20, 3))
    manager.enqueue([leaves, other, expires, whole])
    assert reached.wait(PATIENCE_S)
    manager.cancel([leaves, leaves])
    while manager.clock() < (expires.deadline or 0.0):
        manager.expire()
    go.set()
    for each in (leaves, other, expires, whole):
        assert each.done.wait(PATIENCE_S) and min(each.tokens) >= 0
    assert isinstance(leaves.error, Cancelled) and isinstance(expires.error, DeadlinePassed)
    assert other.error is None and len(other.tokens) == 8
    assert len(leaves.tokens) == len(expires.tokens) == len(whole.tokens) == 3
    manager.close()
    assert not manager._launched and manager.not_ready_because() == "the server is shutting down"


@pytest.mark.parametrize("policy", [Static(), DEMAND], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("when", ["launching", "before", "listener"])
@pytest.mark.parametrize("number", range(8))
def test_whenever_a_request_is_cancelled_the_others_have_their_texts(
    policy: Policy, when: str, number: int
) -> None:
    """In the handler thread, so that it always happens at the same point."""
    late, calls = Late(), count()

    def requests() -> list[Inference]:
        made = workload(6, Sampling(), longest_prompt=14)
        for each in made:
            each.stop = lambda token: token % 7 == 0
        return made

    def cancel_later(manager: BatchingManager) -> None:
        def called(_: object) -> None:
            if next(calls) == number:
                manager.cancel([leaves])

        for target in inferences if when == "listener" else [late]:
            setattr(target, when, called)

    inferences = requests()
    leaves, limits = inferences[number % 6], dict[str, Any](max_batch_size=3, n_blocks=14)
    whole, _ = served(BatchingManager, policy, requests(), **limits)
    texts, _ = served(AsynchronousManager, policy, inferences, late, cancel_later, **limits)
    for inference, text, expected in zip(inferences, texts, whole):
        assert text == (expected if inference.error is None else expected[: len(text)])


def test_an_iteration_whose_requests_have_all_ended_is_forgotten() -> None:
    late, only = Late(), Inference([1], 9)

    def cancel_later(manager: BatchingManager) -> None:
        late.launching = lambda number: manager.cancel([only])

    found = served(AsynchronousManager, Dynamic(), [only], late, cancel_later)
    assert found == ([[]], []), "no iteration was recorded"


def test_requests_end_in_the_middle_of_an_iteration() -> None:
    """A cancelled one, whose stream gets what is known, and the rest when the server is closed."""
    late, reached, go = paused()
    manager = AsynchronousManager(make_scheduler(Dynamic(), max_batch_size=4), lambda: late)
    events: list[TokenEvent] = []
    leaves = Inference([1], 50, listener=events.append, streamed=True)
    other, short = Inference([2], 50), Inference([3], 3)
    manager.enqueue([leaves, other, short])
    assert reached.wait(PATIENCE_S)
    manager.cancel([leaves])
    closing = threading.Thread(target=manager.close)
    closing.start()
    while manager.not_ready_because() is None:
        pass
    go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert all(each.done.is_set() and len(each.tokens) == 3 for each in (leaves, other, short))
    assert isinstance(leaves.error, Cancelled) and isinstance(other.error, Draining)
    assert short.error is None, "its last id was on its way"
    assert [event.n_tokens for event in events] == [1, 2, 3, 3]
    assert [event.is_over for event in events] == [False, False, False, True]


@pytest.mark.parametrize(("engine_ms", "host_ms"), [(10, 3), (3, 10)])
def test_virtual_time_has_the_same_iterations(engine_ms: int, host_ms: int) -> None:
    ms = PS // 1000
    costs = Costs.straight("stated", engine_ms * ms, gap=host_ms * ms)
    iterations, ends = list[list[Any]](), list[int]()

    def computed(stretch: Stretch) -> None:
        rows = stretch.iteration.rows
        iterations.append([(r.inference.id, r.start, r.n_tokens, r.idle) for r in rows])
        ends.append(stretch.end(0))

    limits = {"max_batch_size": 4, "token_budget": 24, "n_blocks": 60, "block_size": 4}
    scheduler, loop = make_scheduler(Dynamic(), **limits), Loop()
    replica = AsynchronousReplica(loop, scheduler, costs, computed=computed)
    requests = workload(12, Sampling())
    loop.serve([(0.0, [each]) for each in requests], replica)
    assert iterations == served(AsynchronousManager, Dynamic(), workload(12, Sampling()))[1]
    assert {b - a for a, b in pairwise(ends[1:])} == {max(engine_ms, host_ms) * ms}
    assert all(each.token_times[-1] == each.answered_at for each in requests)


@pytest.mark.parametrize("policy", [Static(), Dynamic()], ids=lambda p: type(p).__name__)
def test_in_virtual_time_no_request_ends_with_a_token_that_is_still_to_come(policy: Policy) -> None:
    """One expires with the iteration that is computed, and a replica fails in the middle of one."""
    costs, ms = Costs.straight("stated", PS // 100, gap=PS // 1000), PS // 1000
    loop, ended = Loop(), list[tuple[float, int, bool]]()

    def end(now: float, inference: Inference) -> tuple[()]:
        assert len(inference.tokens) == len(inference.token_times)
        ended.append((now, len(inference.tokens), inference.error is None))
        return ()

    scheduler = make_scheduler(policy, max_batch_size=4)
    replica = AsynchronousReplica(loop, scheduler, costs, ended=end)
    expires, whole = Inference([1], 20, deadline=0.035), Inference([2], 2, streamed=True)
    others = [Inference([3], n) for n in (8, 20)]  # one lacks nothing but the token computed then
    loop.at(75 * ms, END, replica.fail, Draining("it fails"))
    loop.serve([(0.0, [each]) for each in (expires, whole, *others)], replica)
    assert ended == [(0.021, 2, True), (0.041, 4, False), *2 * [(0.075, 7, False)]]
