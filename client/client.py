"""The client: one prompt, or a load, against a running server.

    python client/client.py --prompt "hi" --numtokens 10
    python client/client.py --numsamples 100

Runs from the root of the repository or from client/, and needs client/requirements.txt alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # as a script it would start in client/, where `client` is this file

try:
    import aiohttp  # noqa: F401
    import matplotlib  # noqa: F401
    import rich  # noqa: F401
except ImportError as missing:
    sys.exit(f"error: {missing}; run .venv/bin/python client/client.py, or pip install -r client/requirements.txt")

from dotenv import dotenv_values  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from client import graph  # noqa: E402
from client.data import ARRIVALS, LENGTHS, ORDERS, WorkloadError, save_trace, workload  # noqa: E402
from client.load import Outcome, ServerError, get, post, replay, stream  # noqa: E402
from stats import fairness, summarise  # noqa: E402

SHOWN = ("mean", "p50", "p90", "p99", "max")
ROWS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency",
        "normalized_latency": "latency per token", "queue_time": "queue time"}  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Send one prompt, or a load, to a server.", allow_abbrev=False)
    parser.add_argument(
        "--url", help="the server, port 8500 unless one is named (default: IP in client/.env or .env, else 127.0.0.1)"
    )
    one = parser.add_argument_group("one prompt")
    one.add_argument("--prompt", help="the prompt; its completion is printed as it comes")
    one.add_argument("--numtokens", type=int, default=20, help="completion tokens (default: 20)")
    one.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    load = parser.add_argument_group("a load")
    load.add_argument("--numsamples", type=int, help="requests to send")
    load.add_argument("--lengths", default="normal", help=f"completion lengths: {LENGTHS} (default: normal)")
    load.add_argument("--numtokens_range", type=int, nargs="+", metavar="N", help="the same as --lengths choice:N,N,…")
    load.add_argument("--arrival", help=f"{ARRIVALS} (default: wait:1)")
    load.add_argument("--wait", type=float, metavar="S", help="the same as --arrival wait:S")
    load.add_argument("--selection", choices=ORDERS, default="random", help="order: random, or descend (longest first)")
    load.add_argument("--trace", type=Path, help="replay this trace.jsonl instead of drawing a workload")
    load.add_argument("--save-trace", type=Path, metavar="FILE", help="save the workload as a trace")
    load.add_argument("--seed", type=int, default=0, help="of the workload (default: 0)")
    load.add_argument("--figure", type=Path, default=Path("latency_vs_tokens.png"), help="where it goes (default: %(default)s)")
    load.add_argument("--quiet", action="store_true", help="do not print completions as they arrive")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that an answer may take (default: 3600)")
    arguments = parser.parse_args(argv)
    if arguments.prompt is None and arguments.numsamples is None and arguments.trace is None:
        parser.error("give --prompt TEXT, --numsamples N or --trace FILE")
    exclusive = "prompt numsamples, prompt trace, trace numsamples, trace arrival, trace wait, arrival wait"
    for first, second in (pair.split() for pair in exclusive.split(", ")):
        if getattr(arguments, first) is not None and getattr(arguments, second) is not None:
            parser.error(f"--{first} and --{second} contradict each other; leave one out")
    if arguments.numsamples is not None and arguments.numsamples < 1:
        parser.error("--numsamples must be at least 1")
    return arguments


def server_url(given: str | None) -> str:
    """--url, else IP from the environment, client/.env or .env, else this machine; port 8500 unless one is named."""
    address = given or os.environ.get("IP")
    for path in (ROOT / "client" / ".env", ROOT / ".env"):
        address = address or (dotenv_values(path).get("IP") if path.is_file() else None)
    address = (address or "127.0.0.1").rstrip("/")
    if "//" not in address:
        address = f"http://{address}"
    return address if ":" in address.split("//")[1] else f"{address}:8500"


def one_prompt(url: str, arguments: argparse.Namespace) -> None:
    body = {"prompt": arguments.prompt, "num_tokens": arguments.numtokens, "temperature": arguments.temperature}

    def show(text: str) -> None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # our reader has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    stream(url, body, arguments.timeout, show)
    print()


def load(url: str, arguments: argparse.Namespace, console: Console) -> bool:
    """Send a load and show what came of it; True if every request was answered."""
    lengths = arguments.lengths
    if arguments.numtokens_range:
        lengths = "choice:" + ",".join(map(str, arguments.numtokens_range))
    arrival = arguments.arrival or f"wait:{1 if arguments.wait is None else arguments.wait}"
    requests = workload(arguments.trace, arguments.numsamples or 0, lengths, arrival, arguments.selection, arguments.seed)
    if arguments.save_trace:
        save_trace(arguments.save_trace, requests)
    post(f"{url}/stats/reset")
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("[red]{task.fields[failed]}"))  # fmt: skip
    failures = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(requests), failed="")

        def show(outcome: Outcome) -> None:
            nonlocal failures
            failures += bool(outcome.error)
            progress.update(task, advance=1, failed=f"{failures} failed" if failures else "")
            if not arguments.quiet:
                text = outcome.error or outcome.text
                style = "red" if outcome.error else None
                console.print(f"[{outcome.request.id}] {text!r}", style=style, markup=False, highlight=False)

        outcomes = replay(url, requests, arguments.timeout, show)
    answers = [outcome.answer for outcome in outcomes if outcome.answer]
    result = summarise(answers, [outcome.sent_at for outcome in outcomes], {})

    mode = "the server"
    try:
        stats = get(f"{url}/stats")
    except ServerError as error:  # what this client measured is shown all the same
        console.print(f"The server's /stats are missing: {error}", style="red", markup=False)
    else:
        mode = stats["mode"]
        _show_stats(stats, console)
    table = Table("milliseconds", *SHOWN, title=f"{mode} as this client saw it", title_justify="left")
    for name, title in ROWS.items():
        if f"mean_{name}_ms" in result:
            table.add_row(title, *(f"{result[f'{measure}_{name}_ms']:,.1f}" for measure in SHOWN))
    console.print(table)
    console.print(
        f"{result['completed']} answered, {result['failed']} failed; {result['output_throughput']:,.1f} tok/s and "
        f"{result['request_throughput']:.2f} requests a second over {result['wall_clock_s']:.1f} s"
    )
    for reason in sorted({outcome.error for outcome in outcomes if outcome.error})[:5]:
        console.print(f"  failed: {reason}", style="red", markup=False)
    if result["client_limited"]:
        console.print("The client was late: one in a hundred of its sends lagged over 10 ms; its latencies are suspect.")
    if answers:
        tokens, seconds = [a.completion_tokens for a in answers], [a.e2e_s for a in answers]
        graph.latency_vs_tokens({mode: (tokens, seconds, fairness(tokens, seconds))}, arguments.figure, url)
        console.print(f"figure: {arguments.figure}")
    return not failures


def _show_stats(stats: dict[str, Any], console: Console) -> None:
    console.print("\nThe server's /stats:")
    for key in ("latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time", "largest_batch",
                "occupancy", "useful_fraction"):  # fmt: skip
        console.print(f"  {key}: {stats[key]:,.4g}" if isinstance(stats[key], float) else f"  {key}: {stats[key]:,}")


def main() -> None:
    arguments = parse()
    url = server_url(arguments.url)
    try:
        if arguments.prompt is not None:
            one_prompt(url, arguments)
        elif not load(url, arguments, Console()):
            sys.exit(1)
    except WorkloadError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
