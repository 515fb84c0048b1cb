"""Runs of a simulation on the machines of a Ray cluster (`--ray`), with the same results."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from config import ConfigError
from scheduling.policies.own import HANDED_ON

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ["/.git", "/.venv", "/docs", "/results", "/runs", "/tests", "*.safetensors"]


class Cluster(Executor):
    """Workers on a Ray cluster, each with a CPU. A call whose machine is lost is made again. After
    Ctrl-C every call that is not over has the result None. Raises ConfigError.

    The cluster's machines need this machine's Python packages, and a user's own policies at the
    same paths; the project's code is sent to them.
    """

    def __init__(self, address: str):
        """address: as `ray start` prints it, HOST:PORT, or auto."""
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "Ray is missing; install it: .venv/bin/python -m pip install -r "
                "requirements-ray.txt, or use --jobs"
            ) from None
        own = {name: os.environ[name] for name in (HANDED_ON,) if name in os.environ}
        code = {"working_dir": str(ROOT), "excludes": LEFT_OUT, "env_vars": own}
        try:
            ray.init(address, runtime_env=code, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--ray {address}: no cluster answers there ({str(error).splitlines()[0]}); start "
                "one with: ray start --head"
            ) from None
        self._ray, self._calls = ray, list[Any]()
        self._task = ray.remote(max_retries=-1)(_called)

    def submit(  # type: ignore[override]
        self, function: Callable[..., Any], *arguments: Any
    ) -> Future[Any]:
        call = self._task.remote(function, *arguments)
        self._calls.append(call)
        future: Future[Any] = call.future()
        return future

    def result(self, future: Future[Any]) -> Any:
        """Return a result. Ctrl-C stops all calls."""
        try:
            return future.result()
        except (KeyboardInterrupt, self._ray.exceptions.TaskCancelledError):
            self._stop()
            return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._stop()
        self._ray.shutdown()

    def _stop(self) -> None:
        for call in self._calls:
            self._ray.cancel(call, force=True)


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
