"""The client: one prompt, or a load, against a running server.

    python client/client.py --prompt "hi" --numtokens 10
    python client/client.py --numsamples 100

Runs from the root of the repository or from client/, and needs client/requirements.txt alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # as a script it would start in client/, where `client` is this file

from config import environment  # noqa: E402, F401 - where a package is missing

# isort: split
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from client import runs, workloads  # noqa: E402
from client.addresses import api_key, server_url, target_of  # noqa: E402
from client.calls import ServerError, stream  # noqa: E402
from client.draws import ARRIVALS, WorkloadError  # noqa: E402
from client.groups import describe, described  # noqa: E402
from client.machine import command_line  # noqa: E402
from client.measure import Target, measure, with_requests  # noqa: E402
from client.outcomes import Outcome  # noqa: E402
from client.progress import Progress  # noqa: E402
from client.summary import latency_line  # noqa: E402
from client.traces import Request, replayed, save_trace  # noqa: E402
from client.wire import APIS  # noqa: E402
from compare.options import OVERWRITE, check_numbers, file, folder, parse_goodput  # noqa: E402
from config import ConfigError, Parser  # noqa: E402
from stats import LIMITED, MEASURES  # noqa: E402

SHOWN = ("mean", "p50", "p90", "p99", "max")
FIGURE = Path("latency_vs_tokens.png")
IN_STATS = (
    "latency-per-token", "throughput", "total-tokens-handled", "total-elapsed-time",
    "largest_batch", "occupancy", "useful_fraction",
)  # fmt: skip


SERVER: dict[str, dict[str, Any]] = {
    "--url": {"help":
        "the server's address; port 8500 unless it has one (default: IP in client/.env or .env, "
        "else 127.0.0.1)"},
    "--api-key": {"metavar": "KEY", "help":
        "the server's API key (default: EB_API_KEY, read from the same places as IP)"},
    "--api": {"choices": APIS, "default": "inference", "help":
        "inference: the API of our servers; openai: that of any server"},
    "--model": {"help":
        "the model in an OpenAI request (default: the first that the server lists)"},
    "--timeout": {"type": float, "default": 3600, "help":
        "seconds that an answer may take (default: 3600)"},
}  # fmt: skip
ONE: dict[str, dict[str, Any]] = {
    "--prompt": {"help": "the prompt; its completion is printed as it comes"},
    "--numtokens": {"type": int, "default": 20, "help": "completion tokens (default: 20)"},
    "--temperature": {"type": float, "default": 0.0, "help": "0 is greedy (default: 0)"},
}
LOAD: dict[str, dict[str, Any]] = {
    "--numsamples": {"type": int, "help": "number of requests"},
    "--numtokens_range": {"type": int, "nargs": "+", "metavar": "N", "help":
        "the same as --lengths choice:N,N,…"},
    "--arrival": {"help": f"{ARRIVALS} (default: wait:1)"},
    "--wait": {"type": float, "metavar": "S", "help": "the same as --arrival wait:S"},
    "--save-trace": {"type": file, "metavar": "FILE", "help": "save the workload as a trace"},
    "--seed": {"type": int, "default": 0, "help": "seed of the workload (default: 0)"},
    "--stream": {"action": "store_true", "help":
        "ask for streams (OpenAI's requests always do)"},
    "--goodput": {"nargs": "+", "default": [], "metavar": "NAME:MS", "help":
        f"limits on {', '.join(LIMITED)}"},
    "--out": {"type": folder, "help": "save the run with its report in this folder"},
    "--figure": {"type": file, "help": f"file of the figure (default: {FIGURE}, each time anew)"},
    "--overwrite": OVERWRITE | {"help":
        "replace an earlier run in --out, and files of --save-trace and --figure (else refused)"},
    "--quiet": {"action": "store_true", "help": "do not print completions as they arrive"},
}  # fmt: skip


MOST_USED = (
    "--url", "--api", "--prompt", "--numtokens", "--numsamples", "--arrival", "--lengths",
    "--trace", "--stream", "--goodput", "--out", "--quiet",
)  # fmt: skip
EXAMPLES = (
    "client/client.py --prompt hi --numtokens 10",
    "client/client.py --numsamples 100 --arrival poisson:8",
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError and WorkloadError; exits 0 after --help."""
    parser = Parser(
        prog="client/client.py",
        usage="%(prog)s --prompt TEXT | --numsamples N | --trace FILE [--flag X …]",
        description="Send one prompt, or a load, to a server.",
        most_used=MOST_USED,
        examples=EXAMPLES,
    )
    one, load = parser.add_argument_group("one prompt"), parser.add_argument_group("a load")
    for group, flags in ((parser, SERVER), (one, ONE), (load, LOAD)):
        for name, options in flags.items():
            group.add_argument(name, **options)
    workloads.add_workload(load)
    arguments = parser.parse_args(argv)
    if arguments.numtokens_range:
        arguments.lengths = "choice:" + ",".join(map(str, arguments.numtokens_range))
    for first, second in (
        ("prompt", "numsamples"), ("prompt", "trace"), ("prompt", "users"), ("arrival", "wait"),
    ):  # fmt: skip
        if getattr(arguments, first) is not None and getattr(arguments, second) is not None:
            parser.error(f"--{first} and --{second} contradict each other; leave one out")
    check_numbers(arguments)
    if wrong := workloads.contradiction(arguments):
        parser.error(wrong)
    sized = arguments.numsamples is not None or workloads.seconds_say_how_many(arguments)
    if arguments.prompt is None and arguments.trace is None and not sized:
        parser.error("give --prompt TEXT, --numsamples N or --trace FILE")
    if arguments.prompt is not None and (arguments.api != "inference" or arguments.model):
        parser.error(
            "--prompt asks a server of ours; leave out --api and --model, or send it with --trace"
        )
    return arguments


def one_prompt(url: str, arguments: argparse.Namespace) -> None:
    body = {
        "prompt": arguments.prompt,
        "num_tokens": arguments.numtokens,
        "temperature": arguments.temperature,
    }

    def show(text: str) -> None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:  # our reader has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    stream(url, body, arguments.timeout, show, api_key(arguments.api_key))
    print()


def load_of(arguments: argparse.Namespace) -> tuple[Sequence[Request], dict[str, Any]]:
    """Return the requests to send, and their description in a report. Raises WorkloadError."""
    arrival = arguments.arrival or (None if arguments.wait is None else f"wait:{arguments.wait}")
    if arguments.trace:
        requests, words = replayed(arguments.trace, arguments.scale, arrival, arguments.seed)
    else:
        workload = workloads.Workload(**workloads.given_workload(arguments), seed=arguments.seed)
        arrival = arrival or "wait:1"
        requests = workload.requests(arguments.numsamples, arrival)
        words = {"arrival": arrival} | workload.words
    return requests, describe(requests) | words


def load(url: str, arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Send a load, save its result and show it; return the measurement."""
    requests, description = load_of(arguments)
    goodput = parse_goodput(arguments.goodput)
    target = target_of(url, arguments)
    written = [*filter(None, (arguments.save_trace, arguments.figure))]
    if arguments.out:
        written += runs.files(arguments.out, [target.name])
    runs.refuse_overwriting(written, arguments.overwrite)
    if arguments.save_trace:
        save_trace(arguments.save_trace, requests)
    machine = runs.facts() if arguments.out else {}
    console.print(described(description), highlight=False)
    with Progress(console) as progress:
        with progress.replay(target.name, requests) as watch:
            if not arguments.quiet:
                watch.show = lambda outcome: _show_text(outcome, console)
            result, outcomes = measure(target, requests, goodput, arguments.timeout, watch)
        if arguments.out:  # saved first, whatever may fail to be shown
            runs.clear(arguments.out)
            save_trace(arguments.out / "trace.jsonl", requests)
            facts = machine | {
                "goodput": goodput,
                "stream": arguments.stream or not target.ours,
                "capacity": None,
                "seed": arguments.seed,
                "asked": {"seeds": [arguments.seed], "servers": [target.name]},
                "started_here": False,
                "stopped": "interrupted before its end" if result["partial"] else None,
                "also": {} if target.ours else {target.name: url},
                "command": command_line("client/client.py", sys.argv[1:]),
            }
            results = {target.name: with_requests(result, outcomes)}
            runs.save(arguments.out, requests, results, description, facts)
        _show(result, target, arguments, console)
        if result["client_limited"]:
            progress.say(
                "The client was late: one in a hundred of its sends lagged over 10 ms; its "
                "latencies are suspect."
            )
        with progress.step("drawing figures"):
            from client import drawing
            from compare.report import figures, report

            if answers := [outcome.answer for outcome in outcomes if outcome.answer]:
                tokens, seconds = [a.completion_tokens for a in answers], [a.e2e_s for a in answers]
                lines = {target.name: (tokens, seconds, latency_line(tokens, seconds))}
                figure = arguments.figure or FIGURE
                drawing.save(figures.latency_vs_tokens(lines, url), figure)
                progress.say(f"figure: {figure}")
            if arguments.out:
                report.write(runs.load(arguments.out))
                progress.say(f"report.html: {arguments.out}")
    return result


def _show(
    result: dict[str, Any], target: Target, arguments: argparse.Namespace, console: Console
) -> None:
    if server := result.get("server"):
        console.print("\nThe server's /stats:")
        for key in IN_STATS:
            form = ",.4g" if isinstance(server[key], float) else ","
            console.print(f"  {key}: {server[key]:{form}}")
    table = Table(
        "milliseconds", *SHOWN, title=f"{target.name} as this client saw it", title_justify="left"
    )
    for name, each in MEASURES.items():
        if each.title and result[f"mean_{name}_ms"] is not None:
            values = [result[f"{statistic}_{name}_ms"] for statistic in SHOWN]
            table.add_row(each.title, *(f"{value:,.1f}" for value in values))
    console.print(table)
    console.print(
        f"{result['completed']} answered, {result['failed']} failed; "
        f"{result['output_throughput']:,.1f} tok/s and {result['request_throughput']:.2f} requests "
        f"a second over {result['wall_clock_s']:.1f} s"
    )
    if arguments.goodput:
        limits = " ".join(arguments.goodput)
        console.print(f"{result['goodput'] or 0:.2f} requests a second within {limits}")
    for reason, n in [*result["errors"].items()][:5]:
        console.print(f"  failed: {reason} ({n} times)", style="red", markup=False)


def _show_text(outcome: Outcome, console: Console) -> None:
    text, style = outcome.error or outcome.text, "red" if outcome.error else None
    console.print(f"[{outcome.request.id}] {text!r}", style=style, markup=False, highlight=False)


def main() -> None:
    try:
        arguments = parse()
        url = server_url(arguments.url)
        if arguments.prompt is not None:
            one_prompt(url, arguments)
        else:
            result = load(url, arguments, Console())
            if result["partial"]:
                print("interrupted; the requests that had ended are shown above", file=sys.stderr)
                sys.exit(130)
            if result["errors"]:
                sys.exit(1)
    except (ConfigError, WorkloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
