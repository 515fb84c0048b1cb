"""Several servers on this machine behind HAProxy: started, watched, replaced, ended.

    python -m deploy.proxy MODE --replicas N [settings]     (deploy/proxy.sh)

Requests do not come through here: HAProxy passes them on by deploy/haproxy.cfg. It and the servers
have sessions of their own, so that Ctrl-C in a terminal reaches this process alone:

    SIGTERM   no new connections; requests in flight are finished, then all processes end
    SIGINT    requests in flight get an error, and all processes end (Ctrl-C)
    SIGHUP    servers are replaced one after another, each when nothing is in flight there
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

from config import Config, ConfigError, Parser, flag, parse
from config.ports import free_ports
from deploy import haproxy
from deploy.kinds import APPENDED, sharing_cores

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.1
END_S = 10.0  # for processes to end after Ctrl-C, before they are killed
Replicas = tuple[int, int]  # servers that compute prompts for the others, and the others


class Ended(Exception):
    """HAProxy or a server ended unexpectedly; the message is one sentence."""


class Stopped(Exception):
    """SIGTERM or SIGINT was received; the argument is its number."""


class ServerProcess:
    def __init__(
        self, name: str, port: int, command: Sequence[str], environment: Mapping[str, str]
    ):
        """name: HAProxy's, such as servers/2."""
        self.name, self.number, self.port = name, int(name.partition("/")[2]), port
        self._command, self._environment = command, environment
        self.start()

    def start(self) -> None:
        self.was_ready = False
        self.process = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True
        )

    def is_ready(self) -> bool:
        """Return whether GET /ready is answered by 200. Raises Ended if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise Ended(
                f"server {self.number} ended with exit code {code} before it was ready; its "
                "output above says why"
            )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            self.was_ready = connection.getresponse().status == 200
            return self.was_ready
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def end(self) -> None:
        """End at once. Before it is ready, SIGINT would print a traceback of Python's imports."""
        self.process.send_signal(signal.SIGINT if self.was_ready else signal.SIGTERM)


class Proxy:
    """HAProxy and its servers. `folder`: for its files; `settings`: the servers' command line."""

    def __init__(
        self,
        config: Config,
        settings: Sequence[str],
        replicas: Replicas,
        program: str,
        folder: Path,
    ):
        self.config, self.listen = config, config.address
        self.settings, (self.prefill, _) = settings, replicas
        self.prefill_port, *self.ports = free_ports(1 + sum(replicas))
        self.servers: list[ServerProcess] = []
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self._signals.put(number))
        self._admin, listed = haproxy.Admin(folder / "admin"), folder / "servers.cfg"
        text = haproxy.listing(self.ports, self._admin.path, self.prefill, self.prefill_port)
        listed.write_text(text)
        configs = ["-f", str(ROOT / "deploy" / "haproxy.cfg"), "-f", str(listed)]
        environment = os.environ | haproxy.environment(config)
        self._haproxy = subprocess.Popen(
            [program, "-db", *configs], env=environment, start_new_session=True
        )
        self._draining = self._to_replace = False
        self._gone: set[int] = set()  # servers whose end was reported

    def run(self) -> int:
        """Run until a signal or a failure; return the exit code."""
        try:
            self._start()
            self._watch()
        except Stopped as stopped:
            with contextlib.suppress(Stopped):
                if stopped.args == (signal.SIGTERM,):
                    self._drain()
            return 0
        except Ended as ended:
            print(f"error: {ended}", file=sys.stderr)
            return 1
        finally:
            self._end()

    def _start(self) -> None:
        self._wait(self._listens)
        environment = os.environ | {"EB_THREADS": str(self.config.threads)}
        url = f"http://127.0.0.1:{self.prefill_port}"
        of_others = ["--prefill-url", url] if self.prefill else []
        for k, port in enumerate(self.ports, 1):
            first = k <= self.prefill
            settings = [*self.settings, *(["--prefill-only"] if first else of_others)]
            name = f"{'prefill' if first else 'servers'}/{k}"
            words = command(self.config, settings, k, port)
            self.servers.append(ServerProcess(name, port, words, environment))
        self._wait(lambda: not [each for each in self.servers if not each.is_ready()])
        for server in self.servers:
            self._admin.let_in(server.name)
        url = f"http://{self.listen}"
        lines = [f"ready: {len(self.servers)} servers in mode {self.config.mode} on {url}"]
        lines += [
            f"  server {each.number}: http://127.0.0.1:{each.port}, also {url}/replicas/"
            f"{each.number}: /stats, /metrics, /live there are its own"
            for each in self.servers
        ]
        lines.append(f"kill -HUP {os.getpid()} replaces them one after another")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _listens(self) -> bool:
        if (code := self._haproxy.poll()) is not None:
            raise Ended(
                f"HAProxy ended with exit code {code} and does not listen on {self.listen}; above "
                "it says why; another one may have that port: choose another --port"
            )
        return self._admin.path.exists()

    def _watch(self) -> NoReturn:
        while True:
            self._take_signal()
            if (code := self._haproxy.poll()) is not None:
                raise Ended(f"HAProxy ended with exit code {code}")
            for server in self.servers:
                code = server.process.poll()
                if code is not None and server.number not in self._gone:
                    self._gone.add(server.number)
                    print(
                        f"server {server.number} ended with exit code {code}; the others go on, "
                        f"and kill -HUP {os.getpid()} starts it again",
                        file=sys.stderr,
                    )
            if len(self._gone) == len(self.servers):
                raise Ended("no server is left")
            if self._to_replace:
                self._to_replace = False
                self._replace_all()

    def _take_signal(self) -> None:
        """Wait a moment for a signal. Raises Stopped."""
        try:
            number = self._signals.get(timeout=POLL_S)
        except Empty:
            return
        if number == signal.SIGHUP:
            self._to_replace = True
        elif number == signal.SIGINT or not self._draining:
            raise Stopped(number)

    def _wait(self, until: Callable[[], bool], patience_s: float = inf) -> None:
        """Wait until a condition is true. Raises Stopped."""
        deadline = time.monotonic() + patience_s
        while not until() and time.monotonic() < deadline:
            self._take_signal()

    def _replace_all(self) -> None:
        try:
            # first those that ended, which then can take over while another drains
            for server in sorted(self.servers, key=lambda each: each.process.poll() is None):
                self._replace(server)
                print(f"server {server.number} is replaced", file=sys.stderr)
        except Ended as ended:
            print(f"error: {ended}; the others are left as they are", file=sys.stderr)

    def _replace(self, server: ServerProcess) -> None:
        """Replace a server. Raises Ended if the new one does not come up."""
        # also if it has ended: its successor listens before it can answer
        self._admin.drain(server.name)
        if server.process.poll() is None:
            self._wait(lambda: not self._admin.in_flight(server.name), self.config.drain_timeout_s)
            server.process.terminate()
            self._wait(lambda: server.process.poll() is not None)
        self._gone.add(server.number)  # if it does not come back, that is reported below
        server.start()
        self._wait(server.is_ready)
        self._gone.remove(server.number)
        self._admin.let_in(server.name)

    def _drain(self) -> None:
        """Finish requests in flight, within --drain-timeout-s. Raises Stopped on Ctrl-C."""
        self._draining = True
        self._haproxy.send_signal(signal.SIGUSR1)
        self._wait(lambda: self._haproxy.poll() is not None)
        for server in self.servers:
            server.process.terminate()
        self._wait(self._all_ended)

    def _end(self) -> None:
        """End all processes: servers first, so that HAProxy can pass on their last answers."""
        for server in self.servers:
            server.end()
        deadline = time.monotonic() + END_S
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._haproxy.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._haproxy.wait(timeout=1)
        for process in (*(server.process for server in self.servers), self._haproxy):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _all_ended(self) -> bool:
        return all(server.process.poll() is not None for server in self.servers)


def command(config: Config, settings: Sequence[str], number: int, port: int) -> list[str]:
    """Return the command that starts a server: the user's settings, then the server's own."""
    own = ["--host", "127.0.0.1", "--port", str(port)]
    for name in APPENDED:
        if file := getattr(config, name):
            path = Path(file)
            own += [flag(name), str(path.with_stem(f"{path.stem}-{number}"))]
    return [sys.executable, str(ROOT / "launch.py"), *settings, *own]


def read(argv: Sequence[str]) -> tuple[Replicas, list[str]]:
    """Return the servers and their settings. Raises ConfigError; exits 0 after --help."""
    parser = Parser(
        prog="deploy/proxy.sh",
        usage="%(prog)s MODE [--replicas N | --prefill-replicas N --decode-replicas N] [settings]",
        description="Serve GPT-2 by several servers on this machine, behind HAProxy.",
        epilog="Each server takes all settings of ./server.sh (--help lists them); --host and "
        "--port are HAProxy's.",
    )
    for name, what in (
        ("", "number of servers (default: 2)"),
        ("prefill-", "instead: servers that compute prompts and first tokens alone"),
        ("decode-", "servers that compute all other tokens"),
    ):
        parser.add_argument(f"--{name}replicas", type=int, metavar="N", help=what)
    known, settings = parser.parse_known_args(argv)
    prefill, decode = known.prefill_replicas, known.decode_replicas
    if (prefill, decode) == (None, None):
        prefill, decode = 0, 2 if known.replicas is None else known.replicas
    elif None in (prefill, decode) or prefill < 1 or known.replicas is not None:
        raise ConfigError(
            "--prefill-replicas and --decode-replicas belong together; give 1 or more of each, and "
            "leave out --replicas"
        )
    if decode < 1:
        raise ConfigError("--replicas must be at least 1")
    return (prefill, decode), settings


def main() -> None:
    try:
        replicas, settings = read(sys.argv[1:])
        checked = [*settings, *["--prefill-only"] * bool(replicas[0])]
        config, program = parse(checked, fill_in=sharing_cores(sum(replicas))), haproxy.find()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(Proxy(config, settings, replicas, program, Path(folder)).run())


if __name__ == "__main__":
    main()
