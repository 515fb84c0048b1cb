"""Load that the server makes itself for a page: a browser opens six connections to a server, too
few for a queue to grow.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
from contextlib import suppress
from typing import Any

from scheduling.errors import ContextTooLong, InvalidRequest, Overloaded, ServingError
from scheduling.inference import Inference
from server.api.bodies import LoadRequest
from server.live.observer import LEASE_S
from server.request import Request
from server.serving import Server

log = logging.getLogger("effective_batching")
CHECK_S = 0.1  # between two checks of whether a load is to end


class MadeLoad:
    """The load that runs, if any. It ends after its seconds, when a page starts another one or
    stops it, when its page polls no longer, and when the server drains; all but the first cancel
    its requests.
    """

    def __init__(self, server: Server):
        self._server = server
        self._lock = threading.Lock()
        self._load: _Load | None = None

    def start(self, request: LoadRequest) -> str | None:
        """Replace the load, by none at rate 0; return the new id. Raises ContextTooLong.

        Lengths that the request leaves out are half a small context at most.
        """
        most = self._server.config.max_model_len
        lengths = {"num_tokens", "prompt_tokens"} - request.model_fields_set
        fitting = {name: [min(n, most // 2) for n in getattr(request, name)] for name in lengths}
        request = request.model_copy(update=fitting)
        prompt, completion = request.prompt_tokens[1], request.num_tokens[1]
        if request.rate and prompt + completion > most:
            message = f"{prompt} prompt tokens + {completion} completion tokens is beyond the "
            message += f"context of {most}; ask for fewer."
            raise ContextTooLong(message, param="num_tokens")
        with self._lock:
            if self._load is not None:
                self._load.stop()
            self._load = _Load(self._server, request) if request.rate else None
            return self._load.id if self._load else None

    def status(self, id_: str | None) -> dict[str, Any] | None:
        """Return the status of the load, if there is one; a call with its id keeps it alive."""
        with self._lock:
            load = self._load
        if load is None or load.is_over:
            return None
        if load.id == id_:
            load.renew()
        return load.status()


class _Load:
    """A thread that sends requests."""

    def __init__(self, server: Server, request: LoadRequest):
        self.id = secrets.token_hex(8)
        self._server, self._request = server, request
        self._clock = server.manager.clock
        self._end = self._clock() + request.seconds
        self._sent: list[Inference] = []
        self._n_sent = 0
        self._stop = threading.Event()
        self.renew()
        self._thread = threading.Thread(target=self._run, name="made load", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        self._lease = self._clock() + LEASE_S

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "rate": self._request.rate,
            "left_s": round(max(0.0, self._end - self._clock()), 3),
            "sent": self._n_sent,
            "in_flight": sum(inference.answered_at is None for inference in [*self._sent]),
        }

    def _run(self) -> None:
        rng = random.Random(self.id)
        manager = self._server.manager
        due = self._clock()
        try:
            while not self._ends_early() and (self._clock() < self._end or self._in_flight()):
                if due >= self._end:
                    self._stop.wait(CHECK_S)
                elif due > (now := self._clock()):
                    self._stop.wait(min(due - now, CHECK_S))
                else:
                    due = max(due, now - CHECK_S) + rng.expovariate(self._request.rate)
                    self._send(rng)
        except ServingError as error:  # drains, or is broken
            log.warning("the load that a page started ends: %s", error)
        finally:
            manager.cancel(self._sent)

    def _ends_early(self) -> bool:
        late = self._clock() > self._lease
        return late or self._stop.is_set() or self._server.manager.draining

    def _in_flight(self) -> bool:
        self._sent = [inference for inference in self._sent if inference.answered_at is None]
        return bool(self._sent)

    def _send(self, rng: random.Random) -> None:
        """Send a request. Raises ServingError, but not for one that is refused."""
        server, asked = self._server, self._request
        num_tokens, length = rng.randint(*asked.num_tokens), rng.randint(*asked.prompt_tokens)
        ids = rng.choices(range(server.tokenizer.n_vocab), k=length)
        name = rng.choice([*server.models.roots])
        adapter = "" if name == server.models.base else name
        request = Request([ids], num_tokens, adapter=adapter)
        group = server.group(request)
        # beyond what a user may ask for, or its adapter has gone
        with suppress(Overloaded, InvalidRequest):
            server.queue(request, group)
            self._in_flight()
            self._sent += group
        self._n_sent += 1
