"""Histories of vLLM's runs, in the page's format, from its recordings: a line of JSON for each
iteration, written by `lab.vllm_recorder` inside vLLM. What they do not hold stays unknown: a
number below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.runs import RunError
from config.reading import parse
from scheduling.inference import Inference, Iteration, Row, State
from server.live.history import PAUSED, History, QueueSnapshot, Skipped

FORMAT = 1  # of a recording
NAME = "vllm"
SETTINGS = {  # as the page names them, and as vLLM does
    "model": "model",
    "order": "policy",
    "max_batch_size": "max_num_seqs",
    "token_budget": "max_num_batched_tokens",
    "block_size": "block_size",
}
MISSING = (
    "Not in vLLM's recording: which KV blocks are shared or cached, and why a running request is "
    "not computed (drawn as paused)."
)


def is_recording(path: Path) -> bool:
    """Return whether a file is one that `history` reads, by its first line."""
    if not path.is_file():
        return False
    with path.open(errors="replace") as file:
        return file.readline().startswith('{"vllm"')


def history(path: Path, zero: float = 0.0) -> str:
    """Return the history, as JSON. zero: time on the page's clock of the first arrival. Raises
    RunError.
    """
    if not is_recording(path):
        raise RunError(
            f"{path} is no recording of vLLM; make one with lab/vllm_recorder.py, as docs/live.md "
            "says"
        )
    note = f"vLLM: {path.name}"
    try:
        entries, cut = _parsed(path.read_text(errors="replace").removesuffix("\n").split("\n"))
        note += ", whose last line was cut off and is left out" if cut else ""
        about = {"name": "vLLM", "simulated": None, "note": note, "missing": MISSING}
        return _recording(entries, History(about, keep=None), zero)
    except RunError as error:
        raise RunError(f"{path}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not as a recording of vLLM should be: {error!r}") from None


def _parsed(lines: Sequence[str]) -> tuple[list[Any], bool]:
    """Return the lines' JSON, and whether the last one is cut off. Raises RunError."""
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(parse(line))
        except ValueError:
            if number < len(lines):
                raise RunError(f"line {number} is no JSON; remove it") from None
            return entries, True
    return entries, False


def _recording(entries: Sequence[Any], history: History, zero: float) -> str:
    """Note the iterations of a recording: rows, waiting requests and KV blocks of each."""
    head, *steps = entries
    if head["format"] != FORMAT:
        raise RunError(
            f"it is of format {head['format']}, and this code reads format {FORMAT}; record with "
            f"the lab/vllm_recorder.py beside this code"
        )
    if not steps:
        raise RunError("it has no iterations yet; send vLLM some requests first")
    history.about |= {name: head[theirs] for name, theirs in SETTINGS.items()}
    history.about["name"] = f"vLLM {head['vllm']}"
    requests: dict[int, Inference] = {
        number: _request(number, arrived_at, prompt_tokens, max_tokens)
        for step in steps
        for number, _, arrived_at, prompt_tokens, max_tokens in step["new"]
    }
    history.zero = min(i.arrived_at for i in requests.values()) - zero
    running: dict[int, Inference] = {}
    until = float("-inf")
    for step in steps:
        # the next iteration may have been planned before the last one was over
        begin, until = max(step["at"], until), step["until"]
        for number in [*step["preempted"], *step["aborted"]]:
            running.pop(number, None)
        for number in step["aborted"]:
            _end(requests[number], begin, State.CANCELLED, history)
        rows = [_row(requests[number], *values) for number, *values in step["rows"]]
        running |= {row.inference.id: row.inference for row in rows if not row.idle}
        computed = {row.inference.id for row in rows}
        skipped = [
            Skipped(i, PAUSED, i.computed) for id_, i in running.items() if id_ not in computed
        ]
        queue = [requests[number] for number in step["queue"]]
        used, n_blocks = step["blocks_used"], head["num_blocks"]
        history.snapshot(QueueSnapshot(n_blocks - used, -1, -1, queue, n_blocks))
        iteration = Iteration(rows, len(running), step["waiting"], used)
        history.iteration(begin, until - begin, iteration, skipped)
        for row in rows:
            row.inference.token_times += [until] * row.samples
        for number, reason in step["finished"].items():
            failed = reason in ("abort", "error")
            state = State.FAILED if failed else State.FINISHED
            _end(running.pop(int(number)), until, state, history)
    return history.since(None, until)


def _request(id_: int, arrived_at: float, prompt_tokens: int, max_tokens: int) -> Inference:
    return Inference([0] * prompt_tokens, max_tokens, id=id_, arrived_at=arrived_at)


def _row(inference: Inference, start: int, n: int, made: int) -> Row:
    """Return a row. vLLM may compute one after a request's last token: it is idle."""
    if made > 1:
        raise RunError(
            f"request {inference.id} gets {made} tokens at once, and speculative decoding cannot "
            "be shown; record without it"
        )
    recomputed = max(0, min(start + n, inference.computed) - start)
    inference.computed = max(inference.computed, start + n)
    inference.tokens += [0] * made
    return Row(inference, start, n, [], made > 0, inference.answered_at is not None, recomputed)


def _end(inference: Inference, at: float, state: State, history: History) -> None:
    inference.admitted_at, inference.answered_at, inference.state = at, at, state
    history.answered(inference)
