"""A simulated server: it serves a trace in virtual time, and tells what a real one would."""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from client.draws import WorkloadError
from client.load import TICK_S, UNSENT, Interrupted, Watch
from client.outcomes import Outcome, Outcomes
from client.traces import Request, Trace
from config import Config
from observers.server_stats import ServerStats
from scheduling import scheduler
from scheduling.errors import ContextTooLong, InvalidRequest, Overloaded
from scheduling.inference import Inference, Iteration, IterationRecord, Observer
from scheduling.prefix_cache import block_keys
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from simulate import Arrival, Loop, any_ids, seconds
from simulate.costs import Costs
from simulate.fleet import Fleet, Layout
from simulate.loop import LOOK
from simulate.occupancy import Occupancy
from simulate.replica import Stretch
from simulate.time import PS, instant
from stats import Answer, times_of, timings_of
from tokenizer import load_tokenizer


class Simulated:
    """Servers of ours by their Config and what their engine costs, behind a router if they are
    several: `Measurable`.

    stream: requests ask for streams. jump: iterations between which nothing changes are computed at
    once, to the same end. observe: asked of each scheduler who else is told what it does.
    """

    ours = has_report = True

    def __init__(
        self,
        name: str,
        config: Config,
        costs: Costs,
        layout: Layout = Layout(),  # noqa: B008  (it is frozen)
        *,
        stream: bool = False,
        jump: bool = True,
        observe: Callable[[Scheduler], Observer] | None = None,
    ):
        self.name = name
        self.config = config
        if not costs.source:  # stated ones are of the fake engine
            costs = costs.slower(config.fake_slowdown)
        self.costs = replace(costs, gap=costs.gap + instant(config.loop_interval_ms / 1e3))
        self.layout = layout
        self.stream, self.jump, self.observe = stream, jump, observe
        self.begin()

    @property
    def are_several(self) -> bool:
        return self.layout.is_several

    def begin(self) -> None:
        self.stats = ServerStats(self.config.max_batch_size)
        self.occupancy = Occupancy()
        self.replicas: dict[str, Any] = {}

    def replay(self, requests: Sequence[Request], timeout_s: float, watch: Watch) -> Outcomes:
        """Serve a trace. Raises Interrupted on Ctrl-C, and WorkloadError for a request beyond the
        context.
        """
        serving = _Serving(self, Trace.of(requests), watch)
        try:
            serving.run()
            self.replicas = serving.replicas()
        except KeyboardInterrupt:
            raise Interrupted(serving.outcomes) from None
        return serving.outcomes

    def report(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        rows, most = self.occupancy, self.config.max_batch_size
        exact = {  # sums of floats would depend on how many iterations were taken at once
            "busy_s": rows.busy / PS,
            "occupancy": rows.occupied / (rows.busy * most) if rows.busy else 0.0,
        }
        told = self.stats.run().report() | exact | {"replicas": self.replicas}
        return told, rows.over_time(), self.config.model_dump(mode="json")


class _Serving:
    """One trace, while it is served. Times are seconds from its start, for client and server."""

    def __init__(self, server: Simulated, trace: Trace, watch: Watch):
        self.outcomes = Outcomes(len(trace))
        self._left = len(trace)
        self._server, self._trace, self._watch = server, trace, watch
        self._config, self._costs = server.config, server.costs
        self._observers: list[Observer] = [server.stats]
        self._request_s, self._answer_s = server.costs.request / PS, server.costs.answer / PS
        self._encoded = functools.cache(load_tokenizer(server.config.tokenizer).encode_ordinary)
        # who is in flight: which request, by its number, since when, and the token that its
        # completion repeats
        self._asked: dict[Inference, tuple[int, Request, float, int]] = {}
        later = np.flatnonzero(trace.after >= 0)
        self._next = dict(zip(trace.after[later].tolist(), later.tolist()))  # turns, by number
        self._opened_by = np.arange(len(trace))  # the first turn of a conversation
        for i in later.tolist():
            self._opened_by[i] = self._opened_by[trace.after[i]]
        firsts = trace.firsts
        by_time = firsts[np.argsort(trace.at[firsts], kind="stable")]
        self._waiting = iter(by_time.tolist())
        self._loop = Loop()
        self._fleet = Fleet(
            self._loop,
            server.layout,
            self._build,
            self._costs,
            generate=self._generate if server.config.prefix_caching else any_ids,
            computed=self._computed,
            ended=self._ended,
            session=self._session,
            jump=server.jump,
        )

    def _build(self) -> Scheduler:
        built = scheduler.build(self._config)
        if self._server.observe is not None:
            self._observers.append(self._server.observe(built))
        return built

    def run(self) -> None:
        self._loop.serve(self._firsts(), self._arrives)
        first = 0.0 if self._trace.users else float(self._trace.at.min())
        self._loop.at(instant(first), LOOK, self._tick, first, random.Random(0))
        self._loop.run()
        self._fleet.check_done()

    def replicas(self) -> dict[str, Any]:
        """What became of the replicas, once all is served."""
        end_s = float(self.outcomes.ended["ended_at"].max(initial=0.0))
        return {
            "requests": self._fleet.sent,
            "changes": self._fleet.changes,
            "missed": self._fleet.missed,
            "replica_s": self._fleet.replica_seconds(end_s),
        }

    def _session(self, inference: Inference) -> str | None:
        """A user, or a conversation."""
        i, request, *_ = self._asked[inference]
        if request.user or not self._next:
            return request.user
        return str(self._opened_by[i])

    def _firsts(self) -> Iterator[Arrival]:
        """Those that wait for no answer; in a closed loop, one of each user."""
        for i in itertools.islice(self._waiting, self._trace.users):
            request = self._trace[i]
            at = 0.0 if self._trace.users else request.at
            yield self._first(i, request, at)

    def _first(self, i: int, request: Request, at: float) -> Arrival:
        """A request that waits for no answer. Raises WorkloadError for one beyond the context."""
        ids = self._ids_of(request)
        if said := self._too_long(request, ids):
            raise WorkloadError(
                f"request {request.id} of the trace can never be served: {said[4:]} Give shorter "
                f"--lengths, or a smaller --scale"
            )
        return self._sent(i, request, at, ids)

    def _sent(self, i: int, request: Request, at: float, ids: list[int]) -> Arrival:
        """A request that is sent then."""
        config = self._config
        arrives = at + self._request_s
        timeout_s = config.request_timeout_s
        seed = i if request.seed is None else request.seed  # as a server counts on
        sampling = Sampling(request.temperature, request.top_k, request.top_p, seed)
        inference = Inference(
            ids,
            request.num_tokens,
            sampling,
            None if timeout_s is None else arrives + timeout_s,
            streamed=self._server.stream,
            user=request.user,
            priority=request.priority or 0,
            keys=block_keys(ids, config.block_size) if config.prefix_caching else None,
        )
        greedy = request.temperature == 0 and config.model != "fake"
        token = zlib.crc32(array("q", ids)) if greedy else sampling.seed
        self._asked[inference] = i, request, at, token
        return arrives, [inference]

    def _arrives(self, group: Sequence[Inference]) -> None:
        self._watch.sent()
        self._fleet.arrive(group)

    def _generate(self, iteration: Iteration) -> list[int]:
        """An id of its own for each completion: what is generated is not what others share."""
        nobody = (0,)  # who has left
        return [
            int(self._asked.get(row.inference, nobody)[-1]) for row in iteration.rows if row.samples
        ]

    def _computed(self, replica: int, stretch: Stretch) -> None:
        begun, n = stretch.begun, stretch.n
        took = stretch.end(n - 1) - begun - (n - 1) * stretch.gap
        record = IterationRecord(seconds(begun), took / PS, stretch.iteration, n)
        for observer in self._observers:
            observer.iteration(record)
        self._server.occupancy.add(stretch, record)

    def _ended(self, now: float, inference: Inference) -> Iterator[Arrival]:
        i, request, sent_at, _ = self._asked.pop(inference)
        outcome = self._outcome(i, inference, request, sent_at, now)
        if inference.answered_at is not None:
            for observer in self._observers:
                observer.answered(inference)
        elif isinstance(inference.error, Overloaded):
            self._server.stats.refused(inference)
        elif isinstance(inference.error, InvalidRequest):
            self._server.stats.invalid()
        self._end(i, outcome)
        if self._trace.users:
            for following in itertools.islice(self._waiting, 1):
                then = self._trace[following]
                yield self._first(following, then, outcome.ended_at)
        elif (turn := self._next.get(i)) is not None:
            yield from self._next_turn(turn, outcome, inference)

    def _next_turn(self, i: int, before: Outcome, inference: Inference) -> Iterator[Arrival]:
        """The conversation so far, and what is said next, once its user has thought."""
        request = self._trace[i]
        due = before.ended_at + (request.think_s or 0.0)
        error = before.error and UNSENT
        if not error:
            ids = [*inference.prompt_ids, *inference.tokens, *self._ids_of(request)]
            if not (error := self._too_long(request, ids)):
                yield self._sent(i, request, due, ids)
                return
        self._watch.sent()
        sent = error != UNSENT
        at = due if sent else before.ended_at
        self._end(i, outcome := Outcome(request, at, at, at, error=error, sent=sent))
        if (following := self._next.get(i)) is not None:
            yield from self._next_turn(following, outcome, inference)

    def _end(self, i: int, outcome: Outcome) -> None:
        self._left -= 1
        self.outcomes.add(i, outcome)
        self._watch.ended(outcome)

    def _tick(self, first: float, rng: random.Random) -> None:
        """As the client of a real server looks: once in each TICK_S, anywhere in it."""
        if not self._left or self._loop.is_over:
            return
        self._watch.tick()
        k = int((seconds(self._loop.now) - first) / TICK_S) + 1
        at = first + (k + rng.random()) * TICK_S
        self._loop.at(instant(at), LOOK, self._tick, first, rng)

    def _outcome(
        self, i: int, inference: Inference, request: Request, sent_at: float, now: float
    ) -> Outcome:
        answered_at = now + self._answer_s
        if (error := inference.error) is not None:
            said = f"{error.status} {error}"
            return Outcome(request, sent_at, sent_at, answered_at, error=said)
        # a plain answer's first token is told with it; a stream's was sent at once
        told_at = answered_at
        if inference.streamed and inference.answered_at is not None:
            told_at = inference.answered_at + self._answer_s
        times = times_of(inference)
        seen = times.ending_at(told_at)
        gaps = times.itl_s if self.outcomes.keeps(i) else ()
        answer = Answer(
            request.id,
            sent_at,
            sent_at,
            seen.first_token_at,
            seen.last_token_at,
            answered_at,
            len(inference.prompt_ids),
            len(inference.tokens),
            gaps,
            timings_of(inference) | {"itl_s": gaps},
        )
        return Outcome(request, sent_at, sent_at, answered_at, answer)

    def _ids_of(self, request: Request) -> list[int]:
        return request.prompt_ids or self._encoded(request.prompt or "")

    def _too_long(self, request: Request, ids: Sequence[int]) -> str:
        """What a server would say of a request beyond the context; of others nothing."""
        n, most = len(ids), self._config.max_model_len
        if n + request.num_tokens <= most:
            return ""
        return (
            f"{ContextTooLong.status} {n} prompt tokens + {request.num_tokens} completion tokens "
            f"is beyond the context of {most}."
        )
