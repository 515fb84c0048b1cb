"""What HTTP asks of an engine: a small interface. `LocalEngine` is one in this process."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from batching import LONGEST_WAIT_S
from config.config import BOOT_ERROR, Config
from generate.kernels import KernelUnavailable
from generate.loading import load_generator
from generate.memory import OutOfMemory
from generate.weights import WeightsUnavailable
from scheduling.errors import EngineFailed, InvalidRequest, Overloaded, ServingError
from scheduling.inference import Inference
from server.api import about
from server.api.lora import AdapterRoutes
from server.api.messages import Answer
from server.api.refusals import failure, kind_of
from server.api.routes import PROBES, Call, Handlers
from server.live.panel import PageRoutes
from server.request import Models, Request
from server.serving import Load, Refused, Server

if TYPE_CHECKING:
    from tiktoken import Encoding

PROBED_S = 10.0  # for which /ready says why before the process ends
UNREADABLE = (400, 401, 413)  # statuses of refusals that count as invalid
SWITCH_S = 1e-3  # how long a thread waits for another one to release the GIL, see `app.serve`
log = logging.getLogger("effective_batching")


class Engine(Protocol):
    """An engine as HTTP knows it. A group is a request's inferences, which HTTP only reads: they
    get their tokens and ends, `done` is set, and listeners are called, as `Inference` says.
    """

    config: Config
    tokenizer: Encoding
    models: Models
    clock: Callable[[], float]  # of an inference's times
    epoch_offset: float  # seconds since the epoch − this clock

    def group(self, request: Request) -> list[Inference]:
        """Return the inferences of a request. Raises InvalidRequest if they are too many."""

    def queue(self, request: Request, group: Sequence[Inference]) -> None:
        """Queue a group. A refusal is counted, and is raised or each member's error."""

    def cancel(self, inferences: Sequence[Inference]) -> None: ...

    def expire(self) -> None:
        """End requests whose deadline has passed."""

    def ask(self, call: Call) -> Answer:
        """Return the answer of a route about the engine."""

    def refused(self, error: ServingError) -> None:
        """Count a request that was refused before it was queued."""

    def drain(self) -> None:
        """Refuse new requests from now on. Takes no lock."""

    def end(self) -> None:
        """End everything in flight with Draining, and wait for it."""

    def close_files(self) -> None: ...

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """Call once the engine has failed for good."""

    @property
    def exit_code(self) -> int:
        """BOOT_ERROR if the engine failed for good in this process, else 0."""

    @property
    def loaded(self) -> bool: ...


def seconds_until(deadline: float | None, clock: Callable[[], float]) -> float | None:
    """Return a timeout for waiting until a deadline on a clock, if there is one."""
    return None if deadline is None else min(max(0.01, deadline - clock()), LONGEST_WAIT_S)


def counted_as(error: ServingError) -> Refused | None:
    """Return how /stats counts a request that was refused with this error, if it does."""
    if isinstance(error, Overloaded):
        return "refused"
    unreadable = isinstance(error, InvalidRequest) or kind_of(error).status in UNREADABLE
    return "invalid" if unreadable else None


class LocalEngine(Server):
    """A server in this process, with its routes."""

    def __init__(self, config: Config, load: Load = load_generator, *, replica: str | None = None):
        super().__init__(config, load, replica=replica)
        self.clock = self.manager.clock
        self.cancel, self.expire = self.manager.cancel, self.manager.expire
        self.drain, self.end = self.manager.drain, self.manager.close
        self.on_failure = self.manager.on_failure
        self._handlers: Handlers = about.of_server(self, [os.getpid()])
        self._handlers |= AdapterRoutes(self).handlers()
        if config.live != "off":
            self._handlers |= PageRoutes(self).handlers()

    def ask(self, call: Call) -> Answer:
        if call.route not in PROBES:
            self.behind.flush()
        try:
            return self._handlers[call.route](call)
        except ServingError as error:
            self.refused(error)
            return failure(error)

    def refused(self, error: ServingError, first: Inference | None = None) -> None:
        if what := counted_as(error):
            self.count(what, first)

    @property
    def exit_code(self) -> int:
        return BOOT_ERROR if self.manager.failure else 0

    @property
    def loaded(self) -> bool:
        return self.manager.loaded


def start(config: Config, load: Load = load_generator) -> LocalEngine:
    """Return an engine whose process ends with it, in a sentence. Raises what Server does."""
    engine = LocalEngine(config, load)

    def say_why(error: BaseException) -> None:
        known = WeightsUnavailable, KernelUnavailable, OutOfMemory, EngineFailed
        trace = None if isinstance(error, known) else error
        log.error("the server ends: %s", engine.manager.not_ready_because(), exc_info=trace)

    engine.on_failure(say_why)  # the HTTP server then ends it
    for task in (_once_loaded, end_hanging):
        threading.Thread(target=task, args=[engine], daemon=True).start()
    return engine


def end_hanging(engine: LocalEngine) -> None:
    """End the process once a plan hangs: it keeps the lock, without which nothing can be answered,
    so clients see their connections end.
    """
    while (why := engine.manager.deciding.hangs_because()) is None:
        time.sleep(1.0)
    time.sleep(PROBED_S)
    log.error("the server ends: %s", why)
    engine.close_files()
    os._exit(BOOT_ERROR)


def _once_loaded(engine: LocalEngine) -> None:
    """Say that the server is ready, and spare it the long pauses of the garbage collector."""
    if engine.manager.wait_until_loaded():
        # A full collection halts all threads, the engine's too: for 0.1 to 0.2 s, once in some 800
        # requests. So what is loaded is left out of it, and it comes a tenth as often: a request
        # that is over leaves no cycle.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        config, blocks = engine.config, engine.manager.snapshot().n_blocks
        where = config.mode, config.address, blocks
        log.info("ready: %s mode on http://%s, %d KV blocks", *where)
