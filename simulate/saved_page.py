"""Show the rows of a saved run, iteration by iteration, without a server.

python -m simulate.saved_page FILE

RUN           RUN/live.html, of static and dynamic, or the first two, and a link in the run's report
CALLS.jsonl   CALLS.html, of the recording that a server's --record wrote
VLLM.jsonl    the same of a recording of vLLM; --vllm shows it beside a run
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from client.calls import ServerError
from client.draws import WorkloadError
from client.runs import LIVE, RunError, load, refuse_overwriting
from compare.report import report
from config import ConfigError, Parser, refuse_unknown
from server.live import page
from simulate import vllm as vllm_recording
from simulate.saved import chosen, histories

MOST_BYTES = 30_000_000  # of a page that a browser still opens quickly


def main() -> None:
    parser = Parser(
        prog="python -m simulate.saved_page",
        description="The rows of a saved run, iteration by iteration, as one page.",
    )
    add = parser.add_argument
    add("run", type=Path, help="a folder of simulate.sh or compare.sh --record, or a recording")
    add("--vllm", type=Path, metavar="FILE", help="show this recording of vLLM beside one server")
    add("--of", metavar="NAME[,NAME]", help="one or two of its servers (default: static,dynamic)")
    add("--out", type=Path, help="the page (default: in a run's folder, or beside a recording)")
    add(
        "--overwrite",
        action="store_true",
        help="replace a page that is there (else refused, unless in a run)",
    )
    try:
        arguments, unknown = parser.parse_known_args()
        refuse_unknown(parser, unknown)
        run: Path = arguments.run
        texts, seed = histories(run)
        names = arguments.of and arguments.of.split(",")
        if arguments.vllm:
            texts, names = beside(texts, names, arguments.vllm), None
        out = arguments.out or (run.with_suffix(".html") if run.is_file() else None)
        # what is made in a run's folder is made anew
        refuse_overwriting([out] if out else [], arguments.overwrite)
        write_page(run, chosen(texts, names), out)
    except (ConfigError, RunError, ServerError, WorkloadError) as error:
        sys.exit(f"error: {error}")
    if seed:
        print(f"{run}: shown is {seed}", file=sys.stderr)


def beside(texts: Mapping[str, str], names: list[str] | None, log: Path) -> dict[str, str]:
    """Return one server's history and vLLM's; both first requests come at once. Raises RunError."""
    if names is None:
        names = ["dynamic"] if "dynamic" in texts else list(texts)[:1]
    if len(names) > 1:
        raise RunError("beside --vllm a page shows one server; name one with --of")
    [text] = chosen(texts, names)
    first = min((arrived_at for _, arrived_at, *_ in json.loads(text)["requests"]), default=0.0)
    name = vllm_recording.NAME if vllm_recording.NAME not in names else f"{vllm_recording.NAME} 2"
    return {names[0]: text, name: vllm_recording.history(log, first)}


def write_page(run: Path, texts: list[str], out: Path | None) -> None:
    """Write the page, and its link in the report beside it. Raises RunError."""
    if (size := sum(map(len, texts))) > MOST_BYTES:
        raise RunError(
            f"the page of {run} would have {size / 1e6:.0f} MB, too much for a browser; take a "
            f"shorter run, or one server with --of"
        )
    out = out or run / LIVE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page.saved(texts))
    except OSError as error:
        raise RunError(f"{out} cannot be written: {error.strerror}") from None
    if out == run / LIVE:
        report.write(load(run))  # which links it
    print(out)


if __name__ == "__main__":
    main()
