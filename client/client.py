"""The client: one prompt, or a load, against a running server.

    python client/client.py --prompt "hi" --numtokens 10
    python client/client.py --numsamples 100

Runs from the root of the repository or from client/, and needs client/requirements.txt alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # as a script it would start in client/, where `client` is this file

from config import environment  # noqa: E402, F401 - where a package is missing

# isort: split
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from client import arguments, runs  # noqa: E402
from client.addresses import api_key, context_of, server_url, target_of  # noqa: E402
from client.analysis import overload, overload_unknown  # noqa: E402
from client.bounds import cut_in_words, warm_up_in_words  # noqa: E402
from client.calls import ServerError, stream  # noqa: E402
from client.draws import ARRIVALS, WorkloadError  # noqa: E402
from client.groups import describe, described  # noqa: E402
from client.machine import command_line  # noqa: E402
from client.measure import Target, measure, warm_up, with_requests  # noqa: E402
from client.outcomes import Outcome  # noqa: E402
from client.progress import Output, Progress  # noqa: E402
from client.quoting import printable  # noqa: E402
from client.results import KEYS, SHOWN_OF_STATS, Json, Result, share  # noqa: E402
from client.saving import saved  # noqa: E402
from client.stopping import end_as_on_ctrl_c, fail, held  # noqa: E402
from client.summary import latency_line, resent_in_words  # noqa: E402
from client.traces import Request, save_trace  # noqa: E402
from client.wire import APIS, IN_WORDS, OpenAI  # noqa: E402
from client.workloads import Workload  # noqa: E402
from config.flags import Flags, Parser, add_flags, refuse_unknown  # noqa: E402
from config.settings import ConfigError  # noqa: E402
from stats import LIMITED, MEASURES  # noqa: E402

SHOWN = ("mean", "p50", "p95", "p99", "max")
FIGURE = Path("latency_vs_tokens.png")
SERVER: Flags = {
    "--url": {"help":
        "the server's address; port 8500 unless it has one (default: IP in client/.env or .env, "
        "else 127.0.0.1)"},
    "--api-key": {"metavar": "KEY", "help":
        "the server's API key (default: EB_API_KEY, read from the same places as IP)"},
    "--api": {"choices": APIS, "default": "inference", "help":
        "inference: the API of our servers; of any server, openai: completions, chat: messages"},
    "--model": {"help":
        "the model in an OpenAI request (default: the first that the server lists)"},
    "--timeout": {"type": float, "default": 3600, "help":
        "seconds that an answer may take (default: 3600)"},
    **arguments.ASKED,
}  # fmt: skip
ONE: Flags = {
    "--prompt": {"help": "the prompt; its completion is printed as it comes"},
    "--numtokens": {"type": int, "default": 20, "help": "completion tokens (default: 20)"},
}
LOAD: Flags = {
    "--numsamples": {"type": int, "help": "number of requests"},
    "--arrival": {"help": f"{ARRIVALS} (default: wait:1)"},
    "--seed": {"type": int, "default": 0, "help": "seed of the workload (default: 0)"},
    "--stream": {"action": "store_true", "help":
        "ask for streams (OpenAI's requests always do)"},
    "--goodput": {"nargs": "+", "default": [], "metavar": "NAME:MS", "help":
        f"limits on {', '.join(LIMITED)}"},
    "--out": {"type": arguments.folder, "help": "save the run with its report in this folder"},
    "--figure": {"type": arguments.drawn_file, "help":
        f"file of the figure (default: {FIGURE}, each time anew)"},
    "--overwrite": {"action": "store_true", "help":
        "replace an earlier run in --out, and the file of --figure (else refused)"},
    "--quiet": {"action": "store_true", "help": "do not print completions as they arrive"},
}  # fmt: skip
MOST_USED = (
    "--url --api --prompt --numtokens --numsamples --arrival --lengths --trace --stream --goodput "
    "--out --quiet"
)
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
        most_used=MOST_USED.split(),
        examples=EXAMPLES,
    )
    add_flags(parser, SERVER)
    add_flags(parser.add_argument_group("one prompt"), ONE)
    load = LOAD | arguments.SENDING | arguments.WORKLOAD | arguments.BOUNDS | arguments.SVG
    add_flags(parser.add_argument_group("a load"), load)
    known, unknown = parser.parse_known_args(argv)
    refuse_unknown(parser, unknown)
    for name in ("numsamples", "trace", "users"):
        if known.prompt is not None and getattr(known, name) is not None:
            parser.error(f"--prompt and --{name} contradict each other; leave one out")
    of_other, flags = ("--prompt", ONE) if known.prompt is None else ("a load", load)
    if foreign := [name for name in flags if _is_given(known, name, flags[name])]:
        parser.error(f"{foreign[0]} belongs to {of_other}; leave it out")
    if known.model and known.api == "inference":
        parser.error("--model is for --api openai and chat; leave it out")
    if known.svg and not known.out:
        parser.error("--svg is of a report's figures; add --out FOLDER")
    arguments.check_numbers(known)
    arguments.asked_of(known)
    if wrong := arguments.contradiction(known):
        parser.error(wrong)
    sized = known.numsamples is not None or arguments.seconds_say_how_many(known)
    if known.prompt is None and known.trace is None and not sized:
        parser.error("give --prompt TEXT, --numsamples N or --trace FILE")
    if known.prompt is not None and (known.api != "inference" or known.model):
        parser.error(
            "--prompt asks a server of ours; leave out --api and --model, or send it with --trace"
        )
    return known


def _is_given(known: argparse.Namespace, name: str, options: Json) -> bool:
    value = getattr(known, name.removeprefix("--").replace("-", "_"))
    return value not in (None, False, [], options.get("default"))


def one_prompt(url: str, known: argparse.Namespace) -> None:
    body = {"prompt": known.prompt, "num_tokens": known.numtokens, "temperature": 0.0}

    def show(text: str) -> None:
        try:
            print(printable(text), end="", flush=True)
        except BrokenPipeError:  # our reader has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)

    stream(url, body, known.timeout, show, api_key(known.api_key))
    print()


def load_of(known: argparse.Namespace, url: str) -> tuple[Sequence[Request], Json]:
    """Return the requests to send, and their description in a report. Raises WorkloadError."""
    requests: Sequence[Request]
    if file := arguments.trace_file(known):
        requests, words = file.requests(context_of(url, known))
    else:
        workload = Workload(**arguments.given_workload(known), seed=known.seed)
        arrival = known.arrival or "wait:1"
        requests = workload.requests(known.numsamples, arrival)
        words = {"arrival": arrival} | workload.words
    arguments.bounds_of(known).check(len(requests))
    return requests, {**describe(requests), **words}


def load(url: str, known: argparse.Namespace, console: Console) -> Result:
    """Send a load, save its result and show it; return the measurement. Raises RunError if the run
    is saved and has no report.
    """
    requests, description = load_of(known, url)
    goodput, bounds = arguments.parse_goodput(known.goodput), arguments.bounds_of(known)
    target = replace(target_of(url, known), processes=known.client_processes)
    by = target.wire
    written = [known.figure] if known.figure else []
    if known.out:
        written += runs.files(known.out, [target.name])
    runs.refuse_overwriting(written, known.overwrite)
    if not target.ours and requests[0].prompt_ids is not None:
        warm_up(target, by_ids=True)
        if by.in_words:
            console.print(f"{target.name}: {IN_WORDS}", highlight=False)
    machine = runs.facts() if known.out else {}
    console.print(described(description), markup=False, highlight=False)
    with Progress(console) as progress:
        with progress.replay(target.name, requests) as watch:
            if not known.quiet:
                watch.show = lambda outcome: _show_text(outcome, console)
            result, outcomes = measure(target, requests, goodput, known.timeout, watch, bounds)
        if known.out:  # saved first, whatever may fail to be shown
            facts = machine | {
                "goodput": goodput,
                "bounds": asdict(bounds),
                "stream": known.stream or not target.ours,
                "capacity": None,
                "seed": known.seed,
                "asked": {"seeds": [known.seed], "servers": [target.name]},
                "started_here": False,
                "stopped": "interrupted before its end" if result.partial else None,
                "also": {} if target.ours else {target.name: url},
                "asked_as": {target.name: by.about} if isinstance(by, OpenAI) else {},
                "command": command_line("client/client.py", sys.argv[1:]),
            }
            results = {target.name: with_requests(result, outcomes)}

            def save(folder: Path) -> None:
                runs.clear(folder)
                save_trace(folder / "trace.jsonl", requests)
                runs.save(folder, requests, results, description, facts)

            with held():
                out = saved(save, known.out, progress.say)
        _show(result, target, known, console)
        if result.client_limited:
            progress.say(
                "The client was late: one in a hundred of its sends lagged over 10 ms; its "
                "latencies are suspect."
            )
        with progress.step("drawing figures"):
            if answers := [outcome for outcome in outcomes if not outcome.error]:
                from client import drawing  # matplotlib takes 0.6 s to load

                tokens, seconds = [a.completion_tokens for a in answers], [a.e2e_s for a in answers]
                lines = {target.name: (tokens, seconds, latency_line(tokens, seconds))}
                figure = known.figure or FIGURE
                drawing.save(drawing.latency_vs_tokens(lines, url), figure)
                progress.say(f"figure: {figure}")
            if known.out:
                report(out, *(["--svg"] if known.svg else []))
                progress.say(f"report.html: {out}")
    if known.out and out != known.out:
        raise runs.RunError(f"the run is saved in {out}, as {known.out} cannot be written")
    return result


def report(folder: Path, *flags: str) -> None:
    """Make the report of a saved run by the program for it. Raises RunError with its errors."""
    program = [sys.executable, "-m", "compare.report", str(folder.resolve()), *flags]
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=ROOT, env=path, capture_output=True)
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().removeprefix("error: ")
        raise runs.RunError(f"the run is saved in {folder}, but has no report: {why}")


def _show(result: Result, target: Target, known: argparse.Namespace, console: Console) -> None:
    if server := result.server:
        console.print("\nThe server's /stats:")
        for key in SHOWN_OF_STATS:
            form = ",.4g" if isinstance(server[key], float) else ","
            is_share = key in KEYS and KEYS[key].scale == 100
            shown = f"{share(100 * server[key], 1)}%" if is_share else f"{server[key]:{form}}"
            console.print(f"  {key}: {shown}")
    title = f"{target.name} as this client saw it" + " (overloaded)" * bool(overload([result]))
    table = Table("milliseconds", *SHOWN, title=title, title_justify="left")
    for name, each in MEASURES.items():
        if each.title and result.number(f"mean_{name}_ms") is not None:
            values = [result.number(f"{statistic}_{name}_ms") for statistic in SHOWN]
            table.add_row(each.title, *(f"{value:,.1f}" for value in values))
    console.print(table)
    console.print(
        f"{result.completed} answered, {result.failed} failed; "
        f"{result.output_throughput:,.1f} tok/s and {result.request_throughput:.2f} requests "
        f"a second over {result.wall_clock_s:.1f} s"
    )
    if cut := cut_in_words(target.name, [result]):
        console.print(f"{cut}; no measure counts these.")
    if resent := resent_in_words({target.name: [result]}):
        console.print(resent)
    if known.warm_up:
        console.print(warm_up_in_words(known.warm_up))
    if known.goodput:
        limits = " ".join(known.goodput)
        rate, part = result.goodput or 0, share(100 * (result.attainment or 0))
        console.print(f"{rate:.2f} requests per second, {part}% of all, within {limits}")
    if words := overload([result]):
        console.print(f"{target.name} was {words}", style="red", highlight=False)
    if words := overload_unknown({target.name: [result]}):
        console.print(words, highlight=False)
    for reason, n in [*result.errors.items()][:5]:
        console.print(f"  failed: {reason} ({n} times)", style="red", markup=False)


def _show_text(outcome: Outcome, console: Console) -> None:
    text, style = outcome.error or outcome.text, "red" if outcome.error else None
    console.print(f"[{outcome.request.id}] {text!r}", style=style, markup=False, highlight=False)


def main() -> None:
    end_as_on_ctrl_c()
    try:
        known = parse()
        url = server_url(known.url)
        if known.prompt is not None:
            one_prompt(url, known)
            return
        result = load(url, known, Output())
    except (ConfigError, WorkloadError) as error:
        fail(error, 2)
    except (ServerError, runs.RunError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    if result.partial:
        print("interrupted; the requests that had ended are shown above", file=sys.stderr)
        sys.exit(130)
    if result.errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
