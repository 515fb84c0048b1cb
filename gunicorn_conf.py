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
    """Take over the worker's signals, once it has installed its own.

    SIGTERM: requests in flight are finished, new ones on connections that are still open get 503. SIGINT and
    SIGQUIT (Ctrl-C, which reaches the worker from the terminal and from gunicorn's master): those in flight
    get an error at once. gunicorn's own handler for these takes the thread pool's lock, and deadlocks when the
    second signal interrupts the first or the main thread holds that lock (gunicorn 27.0.1).
    """
    manager = worker.wsgi.extensions["manager"]
    stop_accepting: Any = signal.getsignal(signal.SIGTERM)

    def drain(signum: int, frame: FrameType | None) -> None:
        manager.drain()
        stop_accepting(signum, frame)

    def end(signum: int, frame: FrameType | None) -> None:
        drain(signum, frame)
        # a thread, since it waits for locks, which a signal handler must not; nobody waits for a model that still loads
        threading.Thread(target=manager.close, daemon=not manager.loaded).start()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGQUIT, end)


def worker_exit(server: Any, worker: Any) -> None:
    """Write what the request log still holds."""
    if worker.wsgi is not None and (request_log := worker.wsgi.extensions.get("request_log")):
        request_log.close()
