"""Fixtures of all tests; a check for leaks, since after a test no handler thread may live on; and
turns on the machine, which a test marked `alone` has for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from app import create_app
from client.calls import post
from generate import kernels
from generate.auto import build
from generate.loading import load_generator
from server.engine import LocalEngine
from tests.programs import empty_figures
from tests.servers import ClientOf, Serve, server, wait_until_free

# on a busy machine drawing an example may take long, which says nothing of what is tested
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
RAY = re.compile(r"test_ray\.py|\[ray\b|on_ray_serve")  # tests that start Ray's processes
REAPED = pytest.StashKey[subprocess.Popen[bytes]]()
for name in [name for name in os.environ if name.startswith("EB_")]:
    del os.environ[name]  # a developer's own settings have no business in the tests
# the same tests everywhere: a GPU has lab/benchmarks/gpu.sh, and its attention kernel runs in
# Triton's interpreter here
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
# torch's threads otherwise wait by spinning, and take the cores from the other workers and their
# servers: twice the CPU
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REAPER = """
import sys, psutil
sys.stdin.read()  # until the tests have ended, however they did
for process in psutil.process_iter(["environ"]):
    if (process.info["environ"] or {}).get("STARTED_BY_TESTS") == sys.argv[1]:
        process.kill()
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "also the tests marked nightly or extra, and all examples of properties"
    parser.addoption("--all", action="store_true", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Start a process that outlives the tests, and ends the servers of those that were killed."""
    if config.getoption("--all"):
        os.environ["ALL_TESTS"] = "yes"  # for tests/counts.py, in the workers of xdist too
    elif not config.option.markexpr and not config.option.file_or_dir:
        config.option.markexpr = "not nightly and not extra"
    if "STARTED_BY_TESTS" not in os.environ:  # not in a worker of xdist
        command, pipe = [sys.executable, "-c", REAPER, str(os.getpid())], subprocess.PIPE
        config.stash[REAPED] = subprocess.Popen(command, stdin=pipe, start_new_session=True)
        os.environ["STARTED_BY_TESTS"] = str(os.getpid())
        kernels.why_unavailable()  # built here, and not by each worker


def pytest_unconfigure(config: pytest.Config) -> None:
    if reaper := config.stash.get(REAPED, None):
        reaper.communicate()


class Files(LoadFileScheduling):  # type: ignore[misc]
    """A file is one worker's, for its servers' sake, and so are all tests of Ray: they wait for it
    most of the time, and two of its clusters at once would wait for each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "Ray" if RAY.search(nodeid) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of Ray first, since they take longest, and files with tests that are `alone` last:
    a worker that waits with one has nothing else to do.
    """
    alone = [item for item in items if item.get_closest_marker("alone")]
    files = {item.path for item in alone}
    items.sort(key=lambda item: (not RAY.search(item.nodeid), item.path in files, item in alone))


# around the time limit: waiting for a turn is no part of a test
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test beside those of other workers; one marked `alone` waits until none runs."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture(autouse=True)
def no_handler_thread_lives_on() -> Iterator[None]:
    yield
    names = "handler", "observers"  # which would keep its server in memory
    for thread in [thread for thread in threading.enumerate() if thread.name in names]:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a test did not close its server"


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Clients of apps in this process, on the fake model unless settings name another."""
    engines: list[LocalEngine] = []

    def make(
        mode: str = "dynamic", engine: Callable[[], Any] | None = None, **settings: Any
    ) -> FlaskClient:
        config = build(mode, {"model": "fake", **settings}, {})
        load = load_generator if engine is None else lambda *_: engine()
        engines.append(made := LocalEngine(config, load))
        return create_app(config, made).test_client()

    yield make
    for each in engines:
        each.close()
        rest = each.manager.snapshot()
        assert rest.waiting == rest.running == rest.blocks_used == 0, "requests or blocks are lost"


@pytest.fixture
def undrawn() -> Iterator[contextlib.ExitStack]:
    """Figures are empty, until it is closed."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(empty_figures())
        yield patches


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Serve]:
    """As `server`, but each mode with its settings starts once, and is idle before each test."""
    urls: dict[str, str] = {}
    with contextlib.ExitStack() as running:

        @contextlib.contextmanager
        def shared(mode: str, flags: Mapping[str, Any]) -> Iterator[str]:
            if (key := f"{mode} {flags}") not in urls:
                urls[key] = running.enter_context(server(mode, flags))
            post(f"{urls[key]}/stats/reset")
            yield urls[key]
            wait_until_free(urls[key])

        yield shared


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's, of which the kernels take as many."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages in which nothing may go wrong: no error, no dialog of a script."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30e3)

    def refuse(dialog: Any) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def listen(message: Any) -> None:
        # the browser itself reports failures of the network
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            wrong.append(message.text)

    def make(address: str) -> Any:
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", refuse)
        tab.on("console", listen)
        tab.goto(address)
        return tab

    yield make
    context.close()
    assert not wrong
