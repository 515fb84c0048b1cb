"""gunicorn's settings, computed from the Config that the launcher handed on.

The batch lives in one process, which is the one worker's, or one beside all workers; a thread for
every request that may be in flight, so that the HTTP layer never caps the batch.
"""

import logging
import os
import resource
import sys
from math import ceil
from typing import Any

from config.config import BOOT_ERROR, END_S, HANDOFF, Config
from server.processes.spawning import exit_code

resolved = Config.model_validate_json(os.environ[HANDOFF])

bind = resolved.address
workers = resolved.http_processes
reuse_port = workers > 1  # each has a socket of its own, among which the system spreads connections
worker_class = "server.http.worker.Worker"
threads = resolved.http_threads
worker_connections = resolved.connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
# where it is full, a client tries again after a second; the system may allow less
# (net.core.somaxconn)
backlog = 8192
timeout = 0  # never kill the worker, and with it the batch, because its threads were busy
# then gunicorn's master kills the worker, which ends before
graceful_timeout = ceil(resolved.drain_timeout_s + END_S) + 5
preload_app = False
control_socket_disable = True
# a client on this machine would be taken for a trusted proxy
forwarded_allow_ips = ""
forwarder_headers = ""
loglevel = "warning"
# after the sentence that says why the server ends, gunicorn's own would hide it
EXITED, END = "Worker (pid:%s) exited with code %s.", {"Shutting down: %s", "Reason: %s"}


def is_needed(record: logging.LogRecord) -> bool:
    """Return whether a line of gunicorn's log says more than the sentence before it."""
    ended = record.msg == EXITED and isinstance(record.args, tuple) and record.args[1] == BOOT_ERROR
    return not ended and record.msg not in END


logging.getLogger("gunicorn.error").addFilter(is_needed)


def post_worker_init(worker: Any) -> None:
    """End the server with its engine; requests in flight have their errors by then."""
    worker.wsgi.extensions["engine"].on_failure(lambda error: worker.end())


def worker_exit(arbiter: Any, worker: Any) -> None:
    """Write the rest of the files; a broken engine ends the launcher, too."""
    app = getattr(worker, "wsgi", None)  # there is none if it was stopped while it loaded
    if app is None:
        return
    engine = app.extensions["engine"]
    engine.close_files()
    if engine.exit_code:
        os._exit(engine.exit_code)


def on_exit(arbiter: Any) -> None:
    """End as the engine's process does, if it has one."""
    if code := exit_code():
        sys.exit(code)
