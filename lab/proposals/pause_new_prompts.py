"""SGLang pull request 35017 (merged): after an iteration of prompts the next ones take no new ones.

Taken: prompts first; after an iteration of prompts the next N begin none, so that rows decode.
Chosen here: a prompt that has begun goes on (there it waits, too), and N is 4 (there 0, off).
"""

from dataclasses import dataclass
from functools import cached_property

from scheduling.history import History
from scheduling.policies.base import View, prefills, setting
from scheduling.policies.dynamic import Dynamic
from scheduling.policies.prefill import DECODES, PROMPTS, Prefill, Share


class Paused(Prefill):
    """As `every:K`, but a prompt that has begun is not interrupted."""

    def shares(self, view: View) -> tuple[Share, ...]:
        begun = any(prefills(row) and row.computed for row in view.running)
        due = view.memories[History].without_prompts >= self.k
        return (PROMPTS, DECODES) if due or begun else (DECODES, PROMPTS)


@dataclass(frozen=True)
class PauseNewPrompts(Dynamic):
    """`dynamic --prefill first`, but after an iteration of prompts the next ones begin none."""

    prompt_pause: int = setting(4, "iterations that begin no prompt, after one that does", ge=0)

    @cached_property
    def prefill_rule(self) -> Prefill:
        return Paused("every", self.prompt_pause)
