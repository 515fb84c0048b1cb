"""gunicorn's settings, computed from the Config that the launcher handed on.

One worker, because the batch lives in one process; a thread for every request that may be in flight, so that
the HTTP layer never caps the batch.
"""

import logging
import os
import signal
import socket
import struct
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


STILL_S = 30  # how long a client may send nothing in the middle of its request, or take nothing of its answer
END_S = 5  # how long Ctrl-C waits for connections
BOOT_ERROR = 3  # gunicorn's code of a worker that is not to be started again


def post_worker_init(worker: Any) -> None:
    """Bound what a client that stands still can hold, and take over the worker's signals once it has installed its own.

    Connections inherit the time limits of the listening socket; without them, a client that sends half a request, or
    does not read its answer, has an HTTP thread for good.

    SIGTERM: requests in flight are finished, new ones on connections that are still open get 503. SIGINT and
    SIGQUIT (Ctrl-C, which reaches the worker from the terminal and from gunicorn's master): those in flight
    get an error at once. gunicorn's own handler for these takes the thread pool's lock, and deadlocks when the
    second signal interrupts the first or the main thread holds that lock (gunicorn 27.0.1).
    """
    for listener in worker.sockets:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STILL_S, 0))
    logging.getLogger("gunicorn.error").addFilter(_say_who_stood_still)

    manager = worker.wsgi.extensions["manager"]
    stop_accepting: Any = signal.getsignal(signal.SIGTERM)

    def drain(signum: int, frame: FrameType | None) -> None:
        manager.drain()
        stop_accepting(signum, frame)

    def end(signum: int, frame: FrameType | None) -> None:
        drain(signum, frame)
        # a thread, since it waits for locks, which a signal handler must not; nobody waits for a model that still loads
        threading.Thread(target=manager.close, daemon=not manager.loaded).start()
        leave = threading.Timer(END_S, _leave, [worker])
        leave.daemon = True
        leave.start()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGQUIT, end)
    manager.on_failure(lambda error: os.kill(os.getpid(), signal.SIGINT))  # those in flight have their errors by then


def _say_who_stood_still(record: logging.LogRecord) -> bool:
    """A line instead of a traceback."""
    if record.exc_info and isinstance(record.exc_info[1], BlockingIOError):
        record.msg, record.args, record.exc_info = f"a client stood still for {STILL_S} s; its connection is closed", (), None
    return True


def _leave(worker: Any) -> None:
    """End although connections are open: their clients send or take nothing."""
    worker_exit(None, worker)
    os._exit(0)


def worker_exit(server: Any, worker: Any) -> None:
    """Write what the request log still holds; a broken engine ends the launcher, too."""
    if worker.wsgi is not None and (request_log := worker.wsgi.extensions.get("request_log")):
        request_log.close()
    if worker.wsgi is not None and worker.wsgi.extensions["manager"].failure is not None:
        os._exit(BOOT_ERROR)
