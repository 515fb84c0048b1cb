"""How many requests per second the client sends from one process and from N, in turn.

    python -m lab.benchmarks.sending [--processes 2] [--pairs 5] [--users 64] [--n 4000]

The server is a C program (needs `cc`) that answers each request at once with the same stream of 16
tokens: on a machine with few cores it has its share of them, too. A closed loop sends as fast as
answers are read.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from client.calls import ServerError
from client.load import replay
from client.processes import replay_in
from client.saving import write
from client.wire import wire
from client.workloads import Workload
from config.settings import ConfigError
from lab.benchmarks.harness import Benchmark, run

TOKENS = 16
BENCHMARK = Benchmark(
    "sending",
    __doc__,
    {
        "--processes": (2, "processes beside one"),
        "--pairs": (5, "pairs of runs"),
        "--users": (64, "requests in flight"),
        "--n": (4000, "requests of each run"),
    },
)


def answer() -> bytes:
    """Return an answer of OpenAI's completions, a stream of TOKENS tokens."""
    chunks = [{"choices": [{"text": " a", "finish_reason": None}]} for _ in range(TOKENS)]
    usage = {"prompt_tokens": 10, "completion_tokens": TOKENS}
    every = [*map(json.dumps, [*chunks, {"choices": [], "usage": usage}]), "[DONE]"]
    body = "".join(f"data: {each}\n\n" for each in every).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


@contextlib.contextmanager
def stub() -> Iterator[str]:
    """Start the server; return its URL. Raises ServerError without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program, said = Path(folder) / "stub", Path(folder) / "answer"
        write(said, answer())
        source = Path(__file__).with_name("stub.c")
        try:
            subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerError(f"the server in C was not compiled ({error}); install cc") from None
        with subprocess.Popen([program, said], stdout=subprocess.PIPE, encoding="utf-8") as process:
            assert process.stdout
            try:
                yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
            finally:
                process.kill()


def main() -> None:
    options = BENCHMARK.parser().parse_args()
    if options.processes < 2:
        raise ConfigError(
            f"--processes {options.processes}: give 2 or more; they are compared with one"
        )
    requests = Workload(f"fixed:{TOKENS}").requests(options.n, f"closed:{options.users}")
    each: dict[int, list[float]] = {1: [], options.processes: []}
    with stub() as url:
        for pair in range(2 * options.pairs):
            n = (1, options.processes)[(pair + pair // 2) % 2]  # in turn, first and last in turn
            how = url, requests, wire("openai", "stub")
            outcomes = replay(*how) if n == 1 else replay_in(n, *how)
            if failed := next((o.error for o in outcomes if o.error), ""):
                raise ServerError(failed)
            seconds = max(o.ended_at for o in outcomes) - min(o.sent_at for o in outcomes)
            each[n].append(len(outcomes) / seconds)
            print(f"{n} process{'es' * (n > 1)}: {each[n][-1]:,.0f} requests/s", flush=True)
    ratios = [b / a for a, b in zip(*each.values())]
    print(f"{options.processes} ÷ 1: {statistics.median(ratios):.2f} (median of {len(ratios)})")
    print(json.dumps({"rates": each, "ratios": ratios} | BENCHMARK.record()))


if __name__ == "__main__":
    run(main)
