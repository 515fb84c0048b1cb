"""Routes that load and unload LoRA adapters while a server runs, as vLLM has them."""

from __future__ import annotations

import os
import threading
import time
from typing import TypeVar

from config.reading import check_name
from scheduling.errors import InvalidRequest, ModelNotFound
from server.api.bodies import LoadAdapterRequest, UnloadAdapterRequest
from server.api.messages import TEXT, Answer
from server.api.reader import parse
from server.api.refusals import Refused
from server.api.routes import LOAD_ADAPTER, UNLOAD_ADAPTER, Call, Handlers
from server.serving import Server

POLL_S = 0.05  # while requests of an adapter that leaves are in flight
Body = TypeVar("Body", LoadAdapterRequest, UnloadAdapterRequest)


class AdapterRoutes:
    """Handlers of these routes. They change what the engine keeps in the machine's memory; what it
    computes with changes between iterations alone, as the scheduler says.
    """

    def __init__(self, server: Server):
        self._server, self._roots = server, server.models.roots
        self._lock = threading.Lock()
        self._leaving: set[str] = set()

    def handlers(self) -> Handlers:
        return {LOAD_ADAPTER: self._load, UNLOAD_ADAPTER: self._unload}

    def _load(self, call: Call) -> Answer:
        body = self._read(LoadAdapterRequest, call)
        name, folder = body.lora_name, body.lora_path
        if not (os.path.isabs(folder) and os.path.isdir(folder)):  # which take any text
            message = f"lora_path: there is no folder {folder[:256]}; give its whole path"
            raise ModelNotFound(message, param="lora_path")
        with self._lock:
            try:
                check_name(name)
                if name in self._leaving or name in self._roots:
                    raise ValueError(f"{name} has been loaded; unload it, or choose another name")
                self._server.add_adapter(name, folder)
            except ValueError as error:
                raise InvalidRequest(f"{name[:128]}: {error}", param="lora_name") from None
        return _answer(f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, call: Call) -> Answer:
        name, server = self._read(UnloadAdapterRequest, call).lora_name, self._server
        with self._lock:
            if name == server.models.base or self._roots.pop(name, None) is None:
                message = f"lora_name: there is no adapter {name[:128]!r}; GET /v1/models has all"
                raise ModelNotFound(message, param="lora_name")
            self._leaving.add(name)
        while server.manager.inspect(lambda s: any(i.adapter == name for i in s.in_flight())):
            time.sleep(POLL_S)
        server.remove_adapter(name)
        self._leaving.remove(name)
        return _answer(f"Success: LoRA adapter '{name}' removed successfully.")

    def _read(self, kind: type[Body], call: Call) -> Body:
        """Return the body of a call, if such calls are allowed."""
        config = self._server.config
        if not config.users_of_keys:
            message = "Only a server with a key reads folders on request; start it with --api-key."
            raise Refused("needs_a_key", message)
        if not config.lora_slots:
            raise InvalidRequest(
                "There is no room for adapters here; start with --lora NAME=FOLDER."
            )
        return parse(kind, call.body)


def _answer(text: str) -> Answer:
    return Answer(text.encode(), content_type=TEXT)
