"""Simulated servers: they serve a trace in virtual time, and report what real ones would."""

from __future__ import annotations

import functools
import itertools
import math
import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from client.calls import ServerError
from client.draws import BlockIds, WorkloadError
from client.load import TICK_S, UNSENT, Interrupted, Watch
from client.measure import ServerReport
from client.outcomes import Outcome, Outcomes
from client.results import Json
from client.traces import Request, Trace
from config.config import Config
from generate.forced import ForcedAcceptance
from generate.tokenizer import load_tokenizer
from scheduling.building import build_group, build_scheduler
from scheduling.errors import ContextTooLong, InvalidRequest, Overloaded
from scheduling.extensions import Group
from scheduling.inference import Inference, Iteration, Slo
from scheduling.latency import times_of
from scheduling.policies import MODES, ORDERS, VICTIMS
from scheduling.records import IterationRecord, Observer
from scheduling.sampling import Sampling
from scheduling.scheduler import Scheduler
from scheduling.user_policies import reason
from server.api.refusals import kind_of
from server.observers.server_stats import ServerStats
from simulate.costs import Costs
from simulate.disaggregated import LIMITS, fleet_of
from simulate.fleet import Layout
from simulate.loop import OBSERVE, PS, Arrival, Loop, instant, seconds
from simulate.occupancy import Occupancy
from simulate.replica import Stretch, any_ids
from stats import gaps_s, timings_of

FEW_TICKS = 200  # ticks of a quiet time; its later ones are skipped


class SimulatedServer:
    """A server of ours, by its Config and the costs of its engine, or several behind a router;
    `Measurable`.

    stream: requests ask for streams. jump: compute iterations at once while nothing changes, with
    the same result. observe: makes an observer of each scheduler.
    """

    ours = True

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
        self.name, self.config, self.layout = name, config, layout
        if not costs.source:  # stated ones are of the fake engine
            costs = costs.slower(config.fake_slowdown)
        self.costs = replace(costs, gap=costs.gap + instant(config.loop_interval_ms / 1e3))
        self.stream, self.jump, self.observe = stream, jump, observe
        self.begin()

    @property
    def are_several(self) -> bool:
        return self.layout.is_several

    def begin(self) -> None:
        self.stats = ServerStats(self.config.max_batch_size)
        self.occupancy = Occupancy()
        self.replicas: Json = {}

    def replay(
        self,
        requests: Sequence[Request],
        timeout_s: float = math.inf,  # has no effect: a client of these servers is patient
        watch: Watch | None = None,
    ) -> Outcomes:
        """Serve a trace. Raises Interrupted on Ctrl-C, or when `watch` says that it is over,
        WorkloadError for a request beyond the context, and ServerError if a policy of a user's own
        fails.
        """
        replay = _Replay(self, Trace.of(requests), watch or Watch())
        try:
            replay.serve()
        except WorkloadError:  # whatever policy serves the trace
            raise
        except BaseException as error:
            config = self.config
            kinds = MODES[config.mode], ORDERS[config.order], VICTIMS[config.victim]
            if why := reason(error, *kinds):
                raise ServerError(why) from error
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(replay.outcomes) from None
            raise
        finally:
            self.replicas = replay.facts()
        return replay.outcomes

    def report(self) -> ServerReport:
        rows, most = self.occupancy, self.config.max_batch_size
        exact = {  # sums of floats would depend on how many iterations were computed at once
            "busy_s": rows.busy / PS,
            "occupancy": rows.occupied / (rows.busy * most) if rows.busy else 0.0,
        }
        stats = self.stats.run().report() | exact | {"replicas": self.replicas}
        source = self.costs.source  # a recording and kernels name their model, kernels no type
        engine = {name: source.get(name) for name in ("model", "dtype") if "model" in source}
        return stats, rows.over_time(), self.config.model_dump(mode="json") | engine


class _InFlight(NamedTuple):
    """A request that was sent."""

    number: int
    request: Request
    sent_at: float
    token: int  # id that its completion repeats


class _Replay:
    """One trace, served. Times are seconds from its start, for client and server."""

    def __init__(self, server: SimulatedServer, trace: Trace, watch: Watch):
        config, costs = server.config, server.costs
        self.outcomes = Outcomes(len(trace))
        self._unended = len(trace)
        self._server, self._config, self._trace, self._watch = server, config, trace, watch
        self._observers: list[Observer] = [server.stats]
        self._request_s, self._answer_s = costs.request / PS, costs.answer / PS
        self._encoded = functools.cache(load_tokenizer(config.tokenizer).encode_ordinary)
        self._in_flight: dict[Inference, _InFlight] = {}
        later, firsts = np.flatnonzero(trace.after >= 0), trace.firsts
        self._next_turn = dict(zip(trace.after[later].tolist(), later.tolist()))  # by number
        self._unsent = iter(firsts[np.argsort(trace.at[firsts], kind="stable")].tolist())
        self._loop = Loop()
        generate = self._generate if config.prefix_caching else any_ids
        forced = ForcedAcceptance(generate, config.forced_rates)
        of_replicas = {
            "generate": forced.generate if config.forced_rates else generate,
            "drafter": forced,
            "computed": self._computed,
            "ended": self._ended,
            "session": self._session,
            "jump": server.jump,
        }
        fleet = fleet_of(config, server.layout)
        self._fleet = fleet(self._loop, server.layout, self._build, costs, **of_replicas)

    def serve(self) -> None:
        """Serve the trace."""
        first = 0.0 if self._trace.users else float(self._trace.at.min())
        self._loop.at(instant(first), OBSERVE, self._tick, first, random.Random(0))
        self._loop.serve(self._firsts(), self)

    def facts(self) -> Json:
        """Return facts of the replicas, up to the last ending."""
        return self._fleet.facts(float(self.outcomes.ended["ended_at"].max(initial=0.0)))

    # ---- requests

    def _firsts(self) -> Iterator[Arrival]:
        """Send the requests that wait for no answer; in a closed loop, one of each user."""
        for i in itertools.islice(self._unsent, self._trace.users):
            yield self._send_first(i, 0.0 if self._trace.users else float(self._trace.at[i]))

    def _send_first(self, i: int, at: float) -> Arrival:
        """Send a request that waits for no answer. Raises WorkloadError beyond the context."""
        ids = self._ids_of(request := self._trace[i])
        if refusal := self._too_long(request, ids):
            raise WorkloadError(
                f"request {request.id} of the trace can never be served: {refusal[4:]} Give "
                f"shorter --lengths, a smaller --scale-tokens or a larger --max-model-len"
            )
        return self._send(i, request, at, ids)

    def _send(self, i: int, request: Request, at: float, ids: list[int]) -> Arrival:
        config, timeout_s = self._config, self._config.request_timeout_s
        arrives = at + self._request_s
        seed = i if request.seed is None else request.seed  # a server numbers them, too
        group = build_group(
            config, [ids], request.num_tokens,
            [Sampling(request.temperature, request.top_k, request.top_p, seed)],
            adapter=self._adapter_of(request), user=request.user, streamed=self._server.stream,
            deadline=timeout_s and arrives + timeout_s, priority=request.priority or 0,
            slo=Slo(request.slo_ttft_ms, request.slo_tpot_ms, request.slo_class),
            expected_tokens=getattr(ids, "expected_tokens", None),  # a recording knows it
        )  # fmt: skip
        greedy = request.temperature == 0 and config.model != "fake"
        token = zlib.crc32(array("q", ids)) if greedy else seed
        self._in_flight[group[0]] = _InFlight(i, request, at, token)
        return arrives, group

    def _send_turn(self, i: int, before: Outcome, inference: Inference) -> Iterator[Arrival]:
        """Send the conversation so far and its next message, once its user has thought."""
        request, at = self._trace[i], before.ended_at
        error = before.error and UNSENT
        if not error:
            at += request.think_s or 0.0
            ids = self._ids_of(request)
            if not request.prompt_ids:
                ids = [*inference.prompt_ids, *inference.tokens, *ids]
            if not (error := self._too_long(request, ids)):
                yield self._send(i, request, at, ids)
                return
        self._watch.sent()
        outcome = Outcome(request, at, at, at, error=error, sent=error != UNSENT)
        self._end(i, outcome)
        if (turn := self._next_turn.get(i)) is not None:
            yield from self._send_turn(turn, outcome, inference)

    def _ids_of(self, request: Request) -> list[int]:
        return request.prompt_ids or self._encoded(request.prompt or "")

    def _adapter_of(self, request: Request) -> str:
        """Return the adapter that a request names. Raises WorkloadError for an unknown model."""
        name, base, adapters = request.model or "", self._config.model_name, self._config.adapters
        if not name or name in adapters:
            return name
        if name == base:
            return ""
        raise WorkloadError(
            f"request {request.id} of the trace names the model {name!r}, and there are "
            f"{', '.join([base, *adapters])}; add adapters by --lora-random, or leave model out"
        )

    def _too_long(self, request: Request, ids: Sequence[int]) -> str:
        """Return the refusal of a request beyond the context; of others nothing."""
        n, most = len(ids), self._config.max_model_len
        if n + request.num_tokens <= most:
            return ""
        error = ContextTooLong(
            f"{n} prompt tokens + {request.num_tokens} completion tokens is beyond the context of "
            f"{most}."
        )
        return f"{kind_of(error).status} {error}"

    def arrive(self, group: Group) -> None:
        self._watch.sent()
        self._fleet.arrive(group)

    def check_done(self) -> None:
        self._fleet.check_done()

    # ---- replicas

    def _build(self) -> Scheduler:
        apart = self._server.layout.prefill_replicas
        built = build_scheduler(self._config.model_copy(update=dict.fromkeys(LIMITS * bool(apart))))
        if self._server.observe is not None:
            self._observers.append(self._server.observe(built))
        return built

    def _session(self, inference: Inference) -> str | None:
        """Return a request's user, or its conversation by the number of the first turn."""
        number, request, *_ = self._in_flight[inference]
        if request.user or not self._next_turn:
            return request.user
        while (before := int(self._trace.after[number])) >= 0:
            number = before
        return str(number)

    def _generate(self, iteration: Iteration) -> list[int]:
        """Return ids that differ by completion, so that prompts share none by chance."""
        ended = (0,)
        return [
            row.inference.prompt_ids.at(row.start + row.n_tokens)
            if isinstance(row.inference.prompt_ids, BlockIds)  # a recording knows answers, too
            else int(self._in_flight.get(row.inference, ended)[-1])
            for row in iteration.rows
            for _ in range(row.samples + len(row.drafts))
        ]

    def _computed(self, replica: int, stretch: Stretch) -> None:
        busy_s = stretch.busy(stretch.n) / PS
        record = IterationRecord(seconds(stretch.begun), busy_s, stretch.iteration, stretch.n)
        for observer in self._observers:
            observer.iteration(record)
        self._server.occupancy.add(stretch, record)

    # ---- answers

    def _ended(self, replica: int, now: float, inference: Inference) -> Iterator[Arrival]:
        sent = self._in_flight.pop(inference)
        outcome = self._outcome(sent, inference, now)
        if inference.answered_at is not None:
            for observer in self._observers:
                observer.answered(inference)
        elif isinstance(inference.error, Overloaded):
            self._server.stats.refused(inference)
        elif isinstance(inference.error, InvalidRequest):
            self._server.stats.invalid()
        self._end(sent.number, outcome)
        if self._trace.users:
            for following in itertools.islice(self._unsent, 1):
                yield self._send_first(following, outcome.ended_at)
        elif (turn := self._next_turn.get(sent.number)) is not None:
            yield from self._send_turn(turn, outcome, inference)

    def _end(self, i: int, outcome: Outcome) -> None:
        self._unended -= 1
        self.outcomes.add(i, outcome)
        self._watch.ended(outcome)
        if self._watch.over:
            raise KeyboardInterrupt

    def _tick(self, first: float, rng: random.Random) -> None:
        """Observe as the client of a real server does: once in each TICK_S, at a random time."""
        if not self._unended or self._loop.is_over:
            return
        k, following = [
            int((seconds(at) - first) / TICK_S) for at in (self._loop.now, self._loop.next_at)
        ]
        quiet = max(0, following - k - 1)  # ticks before anything happens
        few = min(quiet, FEW_TICKS)
        for _ in range(1 + few):
            self._watch.tick()
        self._watch.skip(quiet - few)
        if self._watch.over:
            raise KeyboardInterrupt
        rng.getrandbits(64 * few)  # as much as `few` times of each tick
        at = first + (k + 1 + quiet + rng.random()) * TICK_S
        self._loop.at(instant(at), OBSERVE, self._tick, first, rng)

    def _outcome(self, sent: _InFlight, inference: Inference, now: float) -> Outcome:
        request, sent_at, ended_at = sent.request, sent.sent_at, now + self._answer_s
        if (error := inference.error) is not None:
            reason = f"{kind_of(error).status} {error}"
            return Outcome(request, sent_at, sent_at, ended_at, error=reason)
        # a plain answer has its first token, too; a stream's was sent at once
        last_at = ended_at
        if inference.streamed and inference.answered_at is not None:
            last_at = inference.answered_at + self._answer_s
        times = times_of(inference)
        at_client = times.ending_at(last_at)
        gaps = gaps_s(times) if self.outcomes.keeps(sent.number) else ()
        stamps = sent_at, sent_at, ended_at, at_client.first_token_at, at_client.last_token_at
        n_tokens = len(inference.prompt_ids), len(inference.tokens)
        return Outcome(request, *stamps, *n_tokens, gaps, timings_of(inference) | {"itl_s": gaps})
