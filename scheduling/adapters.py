"""LoRA adapters: their slots in the engine, and the requests that wait for a slot (S-LoRA: Sheng et
al., MLSys 2024; vLLM's `max_loras`). The base model, whose name is empty, needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from scheduling.extensions import Extension
from scheduling.inference import Inference, Row

Rule = Literal["mixed", "grouped", "skip", "drain"]


class Adapters(Extension):
    """Slots of adapters. An adapter that needs a slot takes that of the adapter unused for longest,
    never that of a running inference.

    `--lora-policy` is the rule for a request whose adapter finds no free slot:

    mixed     it waits, and so do all requests behind it in the order
    grouped   as mixed; and a batch has one adapter alone, as which the base model counts, too
    skip      other requests overtake it, for max_wait_s at most, if that is given
    drain     as skip; and for the first such request the adapter with the fewest tokens left to
              compute gets no further requests, so that its slot becomes free
    """

    def __init__(self, n_slots: int, rule: Rule = "mixed", max_wait_s: float | None = None):
        self.slots: dict[str, int] = {}  # by adapter, the one unused for longest first
        self.loads: list[tuple[int, str]] = []  # those that no iteration has carried out yet
        self._free = list(range(n_slots))
        self._rule, self._max_wait_s = rule, max_wait_s
        self._most, self._limit = n_slots, f"max_loras {n_slots}"
        self._uncounted = {""}
        if rule == "grouped":
            self._most, self._limit, self._uncounted = 1, "the one of lora_policy grouped", set()

    def joining(
        self, waiting: Iterable[Inference], running: Iterable[Inference], now: float
    ) -> Iterator[Inference]:
        """Return the requests that may join, each provided that all returned before it join."""
        used = {inference.adapter for inference in running} - self._uncounted
        drained: str | None = None
        for inference in waiting:
            name = inference.adapter
            if name in self._uncounted:
                yield inference
            elif name != drained and (name in used or len(used) < self._most):
                used.add(name)
                yield inference
            elif self._rule in ("mixed", "grouped") or self._is_overdue(inference, now):
                return
            elif self._rule == "drain" and drained is None:
                drained = _with_fewest_tokens(running)

    def excess(self, running: Iterable[Inference]) -> str:
        """Return the rule that so many adapters break which would run; else nothing."""
        n = len({inference.adapter for inference in running} - self._uncounted)
        return f"{n} adapters are more than {self._limit}" if n > self._most else ""

    def place(
        self, admit: list[tuple[Inference, int]], rows: list[Row], running: Iterable[Inference]
    ) -> Sequence[tuple[int, str]]:
        """Give slots to admitted adapters, and sort the rows by slot; return what to load."""
        for inference, _ in admit:
            if (name := inference.adapter) and name not in self.slots:
                slot = self._free.pop(0) if self._free else self._evict(running)
                self.slots[name] = slot
                self.loads = [*self.loads, (slot, name)]
        rows.sort(key=lambda row: self.slots.get(row.inference.adapter, -1))
        return self.loads

    def forget(self, name: str) -> None:
        """Empty an adapter's slot, if it has one; no inference in flight may have the adapter."""
        if name in self.slots:
            self._free.append(self._empty(name))

    def stop_running(self, inference: Inference, now: float) -> None:
        if inference.adapter in self.slots:  # from now on the one used last
            self.slots[inference.adapter] = self.slots.pop(inference.adapter)

    def sampled(self, inferences: Sequence[Inference], now: float) -> None:
        self.loads = []

    def _is_overdue(self, inference: Inference, now: float) -> bool:
        since, longest = inference.uncomputed_since, self._max_wait_s
        return since is not None and longest is not None and since <= now - longest

    def _evict(self, running: Iterable[Inference]) -> int:
        used = {inference.adapter for inference in running}
        return self._empty(next(name for name in self.slots if name not in used))

    def _empty(self, name: str) -> int:
        self.loads = [load for load in self.loads if load[1] != name]
        return self.slots.pop(name)


def _with_fewest_tokens(running: Iterable[Inference]) -> str | None:
    """Return the adapter whose inferences have the fewest tokens left, by predicted lengths."""
    left: Counter[str] = Counter()
    for inference in running:
        completion = inference.standing.predicted_tokens - len(inference.tokens)
        left[inference.adapter] += inference.uncomputed - 1 + max(1, completion)
    del left[""]
    return min(left, key=left.__getitem__, default=None)
