"""The requests of a recording as a trace: as they came, or their minutes drawn anew."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from client.draws import BlockIds
from client.outcomes import Outcome, Outcomes
from client.runs import RunError
from client.traces import ANONYMOUS, LIMITED, Request, Trace
from scheduling.inference import Inference, State
from scheduling.latency import times_of
from scheduling.policies.priority import MOST_LEVELS
from simulate.vllm.costs import parts_of
from simulate.vllm.recording import HASH, Recording
from stats import gaps_s, timings_of

OWN = 2**48  # ids from here on are of one request alone; those of shared blocks are below


class Prompt(BlockIds):
    """A recorded prompt. expected_tokens: those that vLLM could expect of its answer."""

    expected_tokens = 0


class Traffic:
    """Requests of a recording that was read to its end, without those that began before it, got no
    token, or failed. Times are seconds from the first arrival.
    """

    def __init__(self, recording: Recording):
        begun_before = {asked.number for asked in recording.head.in_flight}
        served = [
            inference
            for inference in recording.requests.values()
            if inference.token_times
            and inference.id not in begun_before
            and inference.state is not State.FAILED
        ]
        if not served:
            raise RunError(f"{recording.path} has no request that got a token; send vLLM load")
        self.left_out = len(recording.requests) - len(served)
        self.served = sorted(served, key=lambda inference: inference.arrived_at)
        self.zero = self.served[0].arrived_at
        self.block_size = recording.head.block_size
        self.at = np.array([inference.arrived_at - self.zero for inference in self.served])
        levels = sorted({each.priority for each in recording.asked.values()})
        if len(levels) > MOST_LEVELS and recording.head.policy == "priority":
            raise RunError(
                f"{recording.path}: its requests have {len(levels)} different priorities, of which "
                f"{MOST_LEVELS} can be simulated; record requests of fewer"
            )
        self._asked, self._levels = recording.asked, dict[int, int]()
        self._users = [ANONYMOUS, *{a.user: None for a in recording.asked.values() if a.user}]
        if len(levels) > 1:  # in vLLM the lowest number goes first
            self._levels = {priority: k for k, priority in enumerate(levels, 1)}
        self._ids = self._shared_blocks(recording) if recording.head.prefix_caching else {}
        last = max(inference.token_times[-1] for inference in self.served)
        self.part_s = parts_of(self.zero, last)

    def _shared_blocks(self, recording: Recording) -> dict[int, list[int]]:
        """Return an id for each block of a request, up to the last that another has too."""
        blocks = {
            i.id: [text[k : k + HASH] for k in range(0, len(text), HASH)]
            for i in self.served
            if (text := recording.hashes[i.id])
        }
        times = Counter(each for one in blocks.values() for each in one)
        numbers = {text: k for k, text in enumerate(times) if times[text] > 1}
        return {id_: [numbers[t] for t in one if t in numbers] for id_, one in blocks.items()}

    @property
    def longest(self) -> int:
        """Tokens of the longest request, two at least."""
        return max(2, *(len(i.prompt_ids) + len(i.tokens) for i in self.served))

    @property
    def n_levels(self) -> int:
        return len(self._levels)

    def level(self, number: int) -> int:
        """Return a request's level, 1 the highest; 0: levels have no meaning."""
        asked = self._asked[number]
        return self._levels.get(asked.priority, asked.level)

    def trace(self, seed: int) -> Trace:
        """Return the requests as they came (seed 0), or a bootstrap of their minutes: as many,
        drawn with replacement, one after another.
        """
        numbers, at = np.arange(len(self.served)), self.at
        if seed:
            part = (self.at / self.part_s).astype(int)
            rng, drawn = np.random.default_rng([seed, 13]), np.array([-1])
            while not np.isin(drawn, part).any():  # once, unless all it drew were quiet
                drawn = rng.integers(0, part[-1] + 1, part[-1] + 1)
            chosen = [np.flatnonzero(part == one) for one in drawn.tolist()]
            shifts = [self.part_s * (k - one) for k, one in enumerate(drawn.tolist())]
            numbers = np.concatenate(chosen)
            at = np.concatenate([self.at[which] + by for which, by in zip(chosen, shifts)])
        return self._trace(numbers, np.round(at, 6))

    def _trace(self, numbers: np.ndarray, at: np.ndarray) -> Trace:
        n, served = len(numbers), [self.served[number] for number in numbers.tolist()]
        zeros, asked = np.zeros(n, int), [self._asked[inference.id] for inference in served]
        limits = {
            name: np.array([getattr(each, f"{name}_ms") or np.inf for each in asked], float)
            for name in LIMITED
        }
        return Trace(
            functools.partial(self._request, served, at), np.arange(n), at,
            np.array([len(inference.tokens) for inference in served]),
            np.array([self._users.index(each.user or ANONYMOUS) for each in asked]), self._users,
            np.array([self.level(each.number) for each in asked]), zeros, [ANONYMOUS], limits,
            np.full(n, -1), np.full(n, np.nan), None,
        )  # fmt: skip

    def _request(self, served: Sequence[Inference], at: np.ndarray, i: int) -> Request:
        """Return a request, unchecked: a prompt may have 131,072 ids, which are not there."""
        inference = served[i]
        asked = self._asked[inference.id]
        return Request.model_construct(
            id=i, at=float(at[i]), num_tokens=len(inference.tokens), seed=i, user=asked.user,
            priority=self.level(asked.number) or None, prompt_ids=self.ids(inference, i),
            slo_ttft_ms=asked.ttft_ms, slo_tpot_ms=asked.tpot_ms,
        )  # fmt: skip

    def ids(self, inference: Inference, own: int) -> Prompt:
        blocks, asked = self._ids.get(inference.id, ()), self._asked[inference.id]
        ids = Prompt(blocks, self.block_size, len(inference.prompt_ids), OWN + own)
        ids.expected_tokens = asked.expected or asked.max_tokens
        return ids

    def outcomes(self) -> tuple[Trace, Outcomes]:
        """Return the requests as they came, and as vLLM served them."""
        trace = self.trace(0)
        outcomes = Outcomes(len(trace), whole=True)
        for i, inference in enumerate(self.served):
            outcomes.add(i, self._outcome(trace[i], inference))
        return trace, outcomes

    def _outcome(self, request: Request, inference: Inference) -> Outcome:
        inference.answered_at = inference.token_times[-1]
        times = times_of(inference)
        at = inference.arrived_at - self.zero
        first, last = (each - self.zero for each in (times.first_token_at, times.last_token_at))
        lengths = len(inference.prompt_ids), len(inference.tokens)
        gaps = gaps_s(times)
        timings = timings_of(inference) | {"itl_s": gaps}
        return Outcome(request, at, at, last, first, last, *lengths, gaps, timings)
