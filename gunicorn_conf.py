"""gunicorn's settings, computed from the Config that the launcher handed on.

One worker, because the batch lives in one process; a thread for every request that may be in flight, so that
the HTTP layer never caps the batch.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

from config import HANDOFF, Config

resolved = Config.model_validate_json(os.environ[HANDOFF])

bind = f"[{resolved.host}]:{resolved.port}" if ":" in resolved.host else f"{resolved.host}:{resolved.port}"
workers = 1
worker_class = "gthread"
threads = resolved.http_threads
worker_connections = 2 * resolved.http_threads  # kept-alive connections need no thread
backlog = 2048
keepalive = 75  # longer than clients keep their pools; the default of 2 s resets connections under load
timeout = 0  # never kill the worker, and with it the batch, because its threads were busy
graceful_timeout = resolved.graceful_timeout_s
preload_app = False
control_socket_disable = True
loglevel = "warning" if resolved.log_level == "info" else resolved.log_level


def post_worker_init(worker: Any) -> None:
    """SIGTERM: new requests on connections that are still open get 503 while those in flight are finished."""
    stop_accepting: Any = signal.getsignal(signal.SIGTERM)

    def drain(signum: int, frame: FrameType | None) -> None:
        worker.wsgi.extensions["manager"].drain()
        stop_accepting(signum, frame)

    signal.signal(signal.SIGTERM, drain)


def worker_int(worker: Any) -> None:
    """Ctrl-C: answer what is in flight with an error instead of computing it to the end.

    In a thread of its own, since the signal may have interrupted this thread anywhere.
    """
    threading.Thread(target=worker.wsgi.extensions["manager"].close).start()
