"""Draft tokens of a small model with the same vocabulary (Leviathan et al., ICML 2023).

It samples with a request's own settings and each token's own draw, as the model itself does: so
both come to the same token more often than two draws would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generate.cached import CachedGenerator
from scheduling.inference import Drafter, Inference, Iteration, Row


@dataclass(slots=True)
class _Slot:
    """A place in the draft model's KV cache."""

    blocks: list[int]
    text: Inference  # with the tokens of the one that has the slot, and drafts after them
    known: int = 0  # completion tokens that are no drafts


class DraftModel(Drafter):
    """Proposes what its engine samples, for at most `slots` inferences at a time.

    Each has a slot of so many KV blocks of the engine's own cache, until another one needs it that
    was not used for longest. max_tokens: of an iteration of the engine.
    """

    def __init__(self, engine: CachedGenerator, slots: int, blocks: int, max_tokens: int):
        self._engine, self._max_tokens = engine, max_tokens
        self._free = [list(range(i * blocks, (i + 1) * blocks)) for i in range(slots)]
        self._slots: dict[Inference, _Slot] = {}  # the one not used for longest first

    def propose(self, wanted: Sequence[tuple[Inference, int]]) -> list[list[int]]:
        for inference, _ in wanted:  # in use, so that no other one gets it
            if (slot := self._slots.pop(inference, None)) is not None:
                self._slots[inference] = slot
        slots = [self._slot(inference) for inference, _ in wanted]
        for slot, (inference, _) in zip(slots, wanted):
            _follow(slot, inference)
        lacking = [(slot, slot.known + k) for slot, (_, k) in zip(slots, wanted)]
        while lacking:
            self._compute([slot for slot, _ in lacking])
            lacking = [(slot, end) for slot, end in lacking if len(slot.text.tokens) < end]
        return [slot.text.tokens[slot.known :] for slot in slots]

    def _slot(self, inference: Inference) -> _Slot:
        if (slot := self._slots.get(inference)) is None:
            if not self._free:
                self._free.append(self._slots.pop(next(iter(self._slots))).blocks)
            text = Inference(inference.prompt_ids, inference.num_tokens, inference.sampling)
            slot = self._slots[inference] = _Slot(self._free.pop(), text)
        return slot

    def _compute(self, slots: Sequence[_Slot]) -> None:
        """Compute what is uncomputed of each, as far as an iteration goes; sample where it is all.

        In the first one after a prompt came this is the prompt, later on the last token or two.
        """
        room, rows = self._max_tokens, list[Row]()
        for slot in slots:
            if n := min(slot.text.uncomputed, room):
                room, whole = room - n, n == slot.text.uncomputed
                rows.append(Row(slot.text, slot.text.computed, n, slot.blocks, whole, False))
        ids = iter(self._engine.generate(Iteration(rows, len(rows), waiting=0, blocks_used=0)))
        for row in rows:
            row.inference.computed += row.n_tokens
            if row.samples:
                row.inference.tokens.append(next(ids))


def _follow(slot: _Slot, inference: Inference) -> None:
    """Take over the inference's tokens. What was computed stays as far as the drafts were right."""
    text, tokens, n = slot.text, inference.tokens, slot.known
    for draft, token in zip(text.tokens[n:], tokens[n:]):
        if draft != token:
            break
        n += 1
    text.tokens[n:] = tokens[n:]
    slot.known = len(tokens)
    # the last token is computed in any case, since the next one is sampled after it
    text.computed = min(text.computed, len(text.prompt_ids) + min(n, len(tokens) - 1))
