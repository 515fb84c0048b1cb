"""One server: from a Config to a running engine, and from a prompt to a group of inferences and
back. Knows no HTTP.

Everything that serves is composed here: app.py, the benchmarks and the tests build a `Server`. Who
needs one part alone calls what this calls: `scheduler.build` for a scheduler without an engine,
`generate.load_generator` for an engine without a scheduler.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batching import BatchingManager
from config import Config
from generate import load_generator
from live.observer import Live, about
from observers.line_writer import LineWriter
from observers.metrics import Metrics
from observers.request_log import RequestLog
from observers.server_stats import ServerStats
from scheduling.blocks import block_keys
from scheduling.errors import ContextTooLong, InvalidRequest
from scheduling.inference import Generator, Inference, Sampling
from scheduling.recording import END, Entry, gap, line_of, record
from scheduling.scheduler import build
from tokenizer import LONGEST_TOKEN, Detokenizer, StopRule, load_tokenizer
from weights import locate

Load = Callable[
    [Config, Path | None, int], Generator
]  # of a Config, its checkpoint, and how many ids can be decoded
SHOWN = 80  # characters of a prompt
BACKLOG = 10_000  # entries of a recording that wait to be written: seconds of a fast engine
Prompt = str | list[str] | list[int] | list[list[int]]  # one prompt or several, as text or as ids


def is_alone(prompt: Prompt) -> bool:
    """One prompt, and not a group of them (which a list of one is too)."""
    return isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))


def member_seed(seed: int, i: int) -> int:
    """The seed of a group's i-th member: the group's own for the first, and a mix of both for the
    others.

    A mix, since with seed + i the second of one group would draw like the first of the next.
    """
    digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
    return seed if i == 0 else int.from_bytes(digest[:8], "big") >> 1


class Server:
    """Tokenizer, weights, engine, scheduler, handler thread and observers of a Config.

    The engine loads in the handler thread, by `load`. Raises TokenizerUnavailable,
    WeightsUnavailable, and OSError if the request log or the recording cannot be opened.
    """

    def __init__(self, config: Config, load: Load = load_generator):
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        path, n_vocab = locate(config), self.tokenizer.n_vocab
        self.recording: LineWriter[Entry] | None = None
        if config.record:
            self.recording = LineWriter(config.record, "recording", line_of, BACKLOG, gap)
        self.scheduler = record(config, self.recording.put) if self.recording else build(config)
        self.manager = BatchingManager(
            self.scheduler,
            lambda: load(config, path, n_vocab),
            loop_interval_s=config.loop_interval_ms / 1e3,
        )
        self.stats = ServerStats(config.max_batch_size)
        self.metrics = Metrics(config, self.manager)
        self.request_log: RequestLog | None = None
        if config.request_log:
            self.request_log = RequestLog(
                config.request_log, config.mode, self.manager.epoch_offset
            )
        self.live: Live | None = None
        if config.live == "on":
            self.live = Live(self.manager, about(config, config.model_name), self._beginning)
        for observer in (self.stats, self.metrics, self.request_log, self.live):
            if observer is not None:
                self.manager.observe(observer)
        self._next_seed = config.sampling_seed
        self._lock = threading.Lock()

    def _beginning(self, inference: Inference) -> str | None:
        """Of its prompt, where it may be shown."""
        if not self.config.live_prompts:
            return None
        return self.tokenizer.decode(inference.prompt_ids[: 4 * SHOWN])[:SHOWN]

    def close(self) -> None:
        """End everything in flight, and write what is left to write."""
        self.manager.close()
        self.close_files()

    def close_files(self) -> None:
        """Write what the request log and the recording still hold."""
        if self.request_log is not None:
            self.request_log.close()
        if self.recording is not None:
            self.recording.put(END)
            self.recording.close()

    def _seeds(self, given: int | None, n: int) -> list[int]:
        """The seeds of a group of n: they follow from its own; of one that brings none
        config.sampling_seed, the next one's one more, …
        """
        if given is not None:
            return [member_seed(given, i) for i in range(n)]
        with self._lock:
            first, self._next_seed = self._next_seed, (self._next_seed + n) % 2**63
        return [(first + i) % 2**63 for i in range(n)]

    def encode(
        self, prompt: Prompt, num_tokens: int, *, field: str, length_field: str
    ) -> list[list[int]]:
        """The ids of every prompt, each checked to leave room for `num_tokens`. Raises
        InvalidRequest.

        Refuses a text too long to tokenize before tokenizing it. `field`, `length_field`: what the
        route calls the two.
        """
        config, alone = self.config, is_alone(prompt)
        if not alone and len(prompt) > config.max_in_flight:
            raise InvalidRequest(
                f"This server holds {config.max_in_flight} prompts at most; send fewer at once.",
                param=field,
            )
        several: Sequence[Any] = [prompt] if alone else prompt
        for text in several:
            if (
                isinstance(text, str)
                and len(text.encode()) > config.max_model_len * LONGEST_TOKEN[config.tokenizer]
            ):
                raise ContextTooLong(
                    f"The prompt is longer than the context of {config.max_model_len} tokens; "
                    f"shorten it.",
                    param=field,
                )
        prompts = [
            self.tokenizer.encode_ordinary(text) if isinstance(text, str) else text
            for text in several
        ]
        if not prompts or not all(prompts):
            raise InvalidRequest("A prompt must not be empty.", param=field)
        for ids in prompts:
            if len(ids) + num_tokens > config.max_model_len:
                raise ContextTooLong(
                    f"{len(ids)} prompt tokens + {num_tokens} completion tokens is beyond the "
                    f"context of "
                    f"{config.max_model_len}; shorten the prompt or lower {length_field}.",
                    param=length_field if len(ids) < config.max_model_len else field,
                )
            if not 0 <= min(ids) <= max(ids) < self.tokenizer.n_vocab:
                raise InvalidRequest(
                    f"Every prompt id must be in 0 … {self.tokenizer.n_vocab - 1}.", param=field
                )
        return prompts

    def group(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        sampling: Sampling,
        seed: int | None,
        timeout_s: float | None,
        rule: StopRule | None = None,
        *,
        user: str | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        n: int = 1,
        cache_salt: str = "",
    ) -> list[Inference]:
        """n inferences a prompt, each with a seed of its own, to be waited for or streamed.

        Raises InvalidRequest if they are more than the server holds. cache_salt: who brings another
        shares no KV blocks, and so cannot learn from their speed what was asked here.
        """
        config = self.config
        if len(prompts) * n > config.max_in_flight:
            raise InvalidRequest(
                f"This server holds {config.max_in_flight} completions at most; lower n.", param="n"
            )
        seeds = iter(self._seeds(seed, len(prompts) * n))
        timeout_s = timeout_s or config.request_timeout_s
        deadline = None if timeout_s is None else self.manager.clock() + timeout_s
        group: list[Inference] = []
        for ids in prompts:
            keys = None
            if config.prefix_caching:
                keys = block_keys(ids, config.block_size, cache_salt)
            elif n > 1:  # they share their prompt's blocks all the same, and nobody else finds them
                keys = block_keys(ids, config.block_size, secrets.token_hex())
            leader = None
            for _ in range(n):
                member = Inference(
                    ids,
                    num_tokens,
                    replace(sampling, seed=next(seeds)),
                    deadline,
                    rule.new() if rule else None,
                    user=user or None,
                    priority=priority,
                    queue_timeout_s=queue_timeout_s,
                    keys=keys and [*keys],
                    leader=leader,
                )
                leader = leader or member
                group.append(member)
        return group

    def refused(self, group: Sequence[Inference]) -> None:
        """Count a request that was turned away: by a full queue, by its user's limit."""
        self.stats.refused(group[0])
        self.metrics.refused(group[0])

    def text(self, member: Inference, echo: bool, rule: StopRule | None = None) -> str:
        """The whole text of an answered inference."""
        detokenizer = Detokenizer(self.tokenizer, rule)
        prompt = detokenizer.prompt(member.prompt_ids) if echo else ""
        return prompt + detokenizer.completion(member.tokens, last=True)
