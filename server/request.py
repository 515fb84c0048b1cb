"""What is asked of a server: requests, and the models that they may name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from generate.tokenizer import StopRule
from scheduling.errors import ModelNotFound
from scheduling.extensions import Extension
from scheduling.inference import Inference
from scheduling.sampling import Sampling

if TYPE_CHECKING:
    from tiktoken import Encoding

    from config.config import Config

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """One completion or a group of them. Plain data, which may travel between processes."""

    prompts: Sequence[list[int]]  # lists of ids
    num_tokens: int  # 0: one is computed, and not shown
    sampling: Sampling = GREEDY  # but for its seed
    seed: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    user: str | None = None
    adapter: str = ""  # LoRA adapter; the base model has none
    priority: int = 0
    slo_class: str | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    n: int = 1  # completions of each prompt
    cache_salt: str = ""  # requests with another one share no KV blocks
    # strings that end an answer, beside sampling.stop_ids; None: not even these end it
    stop: Sequence[str] | None = None
    logprobs: int | None = None  # likeliest tokens beside each, with echo of the prompt's too
    # how its answer is made
    form: Literal["inference", "completion", "chat"] = "inference"
    alone: bool = False  # one prompt, and not a group of one
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # each event of a stream has its choice's usage so far
    id: str = ""  # the log has it, too


class Models(Extension):
    """The base model, and LoRA adapters, which may come and go. As an extension of the scheduler it
    refuses requests whose adapter has gone meanwhile.
    """

    def __init__(self, config: Config):
        self.base, self.max_model_len = config.model_name, config.max_model_len
        self.created = int(time.time())
        # the folder of each model, if it has one; threads of HTTP change it, by one call each
        self.roots = {self.base: config.model}
        self.roots |= {name: source.folder or name for name, source in config.adapters.items()}

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter that a request names; "" for the base model. Raises ModelNotFound."""
        if name is None or name == self.base:
            return ""
        if name in self.roots:
            return name
        known = ", ".join(map(repr, [*self.roots]))
        message = f"There is no model {name[:100]!r} here; this server has {known}."
        raise ModelNotFound(message, param="model")

    def check(self, group: Sequence[Inference], now: float) -> None:
        self.adapter_of(group[0].adapter or None)


def stop_rule(request: Request, tokenizer: Encoding) -> StopRule | None:
    """Return the rule by which a request's completions end early, if one may."""
    if request.stop is None:
        return None
    how = request.sampling
    return StopRule(tokenizer, [*request.stop], how.stop_ids, how.min_tokens)
