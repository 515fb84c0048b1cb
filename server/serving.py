"""One server: from a Config to a running engine, and from a request to a group of inferences. Knows
no HTTP.

Everything that serves is composed here: app.py, the benchmarks and the tests build a `Server`. For
one part alone there are `building.build_scheduler`, a scheduler without an engine, and
`generate.loading.load_generator`, an engine without a scheduler.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from batching import BatchingManager
from config.config import Config
from generate.loading import load_generator
from generate.tokenizer import load_tokenizer
from generate.weights import locate
from scheduling.building import build_group, build_scheduler
from scheduling.errors import InvalidRequest, Overloaded
from scheduling.inference import Generator, Inference, Slo
from scheduling.sampling import Sampling, Scores
from server.asynchronous import AsynchronousManager
from server.observers.behind import Behind
from server.observers.line_writer import LineWriter
from server.observers.metrics import Metrics
from server.observers.recent import RecentRequests
from server.observers.recording import END, Entry, gap, line_of, record
from server.observers.request_log import RequestLog
from server.observers.server_stats import ServerStats
from server.request import Models, Request, stop_rule

# makes an engine, from a Config, its checkpoint and the size of the vocabulary
Load = Callable[[Config, Path | None, int], Generator]
Refused = Literal["invalid", "refused"]  # as /stats counts a request that was not queued
BACKLOG = 10_000  # entries of a recording that wait to be written: seconds of a fast engine


def member_seed(seed: int, i: int) -> int:
    """Return the seed of a group's i-th member: the group's own for the first, else a hash of both.

    With seed + i the second member of one group would draw like the first of the next.
    """
    digest = hashlib.sha256(f"{seed} {i}".encode()).digest()
    return seed if i == 0 else int.from_bytes(digest[:8], "big") >> 1


class Server:
    """Tokenizer, weights, engine, scheduler, handler thread and observers of a Config.

    The engine loads in the handler thread, by `load`. replica: its name among several servers.
    Raises TokenizerUnavailable, WeightsUnavailable, and OSError if the request log or the recording
    cannot be opened.
    """

    def __init__(self, config: Config, load: Load = load_generator, *, replica: str | None = None):
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        path, n_vocab = locate(config), self.tokenizer.n_vocab
        self.recording: LineWriter[Entry] | None = None
        if config.record:
            self.recording = LineWriter(config.record, "recording", line_of, BACKLOG, gap)
        self.scheduler = (
            record(config, self.recording.put) if self.recording else build_scheduler(config)
        )
        self.models = Models(config)
        if config.lora_slots:
            self.scheduler.attach(self.models)
        self.generator: Generator | None = None  # once it is loaded

        def loaded() -> Generator:
            self.generator = load(config, path, n_vocab)
            return self.generator

        manager = AsynchronousManager if config.ahead else BatchingManager
        self.manager = manager(
            self.scheduler, loaded, loop_interval_s=config.loop_interval_ms / 1e3
        )
        self.epoch_offset = self.manager.epoch_offset
        self.stats = ServerStats(config.max_batch_size)
        self.metrics = Metrics(config, self.manager, self.stats, replica)
        self.request_log: RequestLog | None = None
        if config.request_log:
            self.request_log = RequestLog(config.request_log, config.mode, self.epoch_offset)
        self.recent = RecentRequests(self.manager)
        self.behind = Behind([self.stats, self.metrics, self.recent])
        for observer in (self.behind, self.request_log):
            if observer is not None:
                self.manager.observe(observer)
        self._next_seed = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """End all requests in flight, and close the files."""
        self.manager.close()
        self.behind.close()
        self.close_files()

    def close_files(self) -> None:
        """Write the rest of the request log and the recording, and close both."""
        if self.request_log is not None:
            self.request_log.close()
        if self.recording is not None:
            self.recording.put(END)
            self.recording.close()

    def _seeds(self, given: int | None, n: int) -> list[int]:
        """Return the seeds of a group of n, which follow from the given one. Without one, members
        of all such requests are numbered: 0, 1, …
        """
        if given is not None:
            return [member_seed(given, i) for i in range(n)]
        with self._lock:
            first, self._next_seed = self._next_seed, (self._next_seed + n) % 2**63
        return [(first + i) % 2**63 for i in range(n)]

    def group(self, request: Request) -> list[Inference]:
        """Return the inferences of a request: n for each prompt, each with a seed and, if
        strings or ids stop it, a rule of its own.

        Raises InvalidRequest if they are more than the server takes.
        Requests with another cache_salt share no KV blocks: their speed reveals nothing of others.
        """
        n = check_size(self.config, request)
        seeds = self._seeds(request.seed, n)
        samplings = [replace(request.sampling, seed=seed) for seed in seeds]
        group = group_of(self.config, request, samplings, self.manager.clock())
        if request.num_tokens and (rule := stop_rule(request, self.tokenizer)):
            for member in group:
                member.stop = rule.new()
        return group

    def queue(self, request: Request, group: Sequence[Inference]) -> None:
        """Queue a request's group. Raises ServingError, which is counted if it is a refusal."""
        try:
            self.manager.enqueue(group)
        except InvalidRequest:
            self.count("invalid")
            raise
        except Overloaded:
            self.count("refused", group[0])
            raise

    def count(self, what: Refused, first: Inference | None = None) -> None:
        """Count a refused request. first: of its inferences, if it has become any."""
        if what == "invalid":
            self.stats.invalid()
        else:
            self.stats.refused(first)

    def add_adapter(self, name: str, folder: str) -> None:
        """Read a LoRA adapter, which requests may name from then on. Raises ValueError."""
        self.manager.wait_until_loaded()
        if self.generator and self.generator.adapters is not None:
            from generate.lora import read_adapter

            self.generator.adapters.add(read_adapter(name, folder, self.config.shape))
        self.models.roots[name] = folder

    def remove_adapter(self, name: str) -> None:
        """Forget a LoRA adapter that no request has any more, and what was computed with it."""
        self.manager.inspect(lambda scheduler: scheduler.forget_adapter(name))
        if self.generator and self.generator.adapters is not None:
            self.generator.adapters.remove(name)

    def report(self, since: int | None = None) -> dict[str, Any]:
        """Return the current run's measures, and if `since` is given each iteration from that
        number on.
        """
        self.behind.flush()
        config = self.config
        blocks = self.manager.snapshot().n_blocks
        report = {"mode": config.mode, "model": config.model, "kv_blocks": blocks}
        report |= self.stats.run().report()
        return report if since is None else report | self.stats.iterations(since)


def check_size(config: Config, request: Request) -> int:
    """Return the number of a request's completions. Raises InvalidRequest if they are too many."""
    if (n := len(request.prompts) * request.n) > config.max_in_flight:
        raise InvalidRequest(
            f"This server holds {config.max_in_flight} completions at most; lower n.", param="n"
        )
    return n


def group_of(
    config: Config, request: Request, samplings: Sequence[Sampling], now: float, keyed: bool = True
) -> list[Inference]:
    """Return the inferences of a request, one for each of `samplings`. keyed: their KV blocks may
    be shared.
    """
    timeout_s = request.timeout_s or config.request_timeout_s
    top, echo = request.logprobs, request.echo
    # a prompt that is scored is computed whole
    unshared = not keyed or (echo and top is not None)
    group = build_group(
        config, request.prompts, max(request.num_tokens, 1), samplings,
        adapter=request.adapter, salt=request.cache_salt, user=request.user or None,
        keys=[()] * len(request.prompts) if unshared else None,
        deadline=None if timeout_s is None else now + timeout_s,
        request_id=request.id, priority=request.priority, prompt_only=not request.num_tokens,
        slo=Slo(request.slo_ttft_ms, request.slo_tpot_ms, request.slo_class),
        queue_timeout_s=request.queue_timeout_s,
    )  # fmt: skip
    if top is not None:
        for member in group:
            member.scores = Scores(top, 1 if echo else len(member.prompt_ids))
    return group
