"""Whether these servers answer what another commit's do, byte for byte, but for times and ids.

    python -m benchmarks.unchanged COMMIT [--models fake,demo]

Every mode, ours and OpenAI's routes, plain and as a stream (whose pieces are joined: how tokens
share events is chance), and what is refused. Tells each difference, and ends with exit code 1 if
there is one. Needs git.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from compare.servers import ROOT, free_port, wait_until_ready
from config import MODES

TIMES = re.compile(
    r'"(arrived_at|queue_s|ttft_s|decode_s|held_s|e2e_s|created)":[\d.e-]+|"itl_s":\[[^\]]*\]'
)
IDS = re.compile(r'"id":"(cmpl|chatcmpl)-[0-9a-f]+"')
WARM = {"temperature": 0.7, "seed": 5}
USAGE = {"include_usage": True}
SENT: list[tuple[str, Any]] = [
    ("/inference", {"prompt": "If the file", "num_tokens": 40, "temperature": 0.0}),
    (
        "/inference",
        {
            "prompt": "If the file",
            "num_tokens": 40,
            "top_k": 20,
            "top_p": 0.9,
            "echo": True,
            **WARM,
        },
    ),
    ("/inference", {"prompt": ["Return the", "A list"], "num_tokens": 30, **WARM}),
    ("/inference", {"prompt_ids": [[65, 66], [67]], "num_tokens": 9, **WARM}),
    ("/inference", {"prompt": "If the file", "num_tokens": 40, "stream": True, **WARM}),
    ("/v1/completions", {"prompt": "If the file", "max_tokens": 40, "stop": ["."], **WARM}),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 20, "stream": True, "stream_options": USAGE, **WARM},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, **WARM},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 20,
            "stream": True,
            **WARM,
        },
    ),
    ("/inference", {"prompt": "", "num_tokens": 1}),
    ("/inference", {"prompt": "a", "num_tokens": 0}),
    ("/inference", {"prompt": "a", "num_tokens": 2000}),
    ("/inference", {"prompt": "a", "num_tokens": "2"}),
    ("/inference", {"prompt": "a", "num_tokens": 2, "nope": 1}),
    ("/inference", {"prompt": ["a"] * 33, "num_tokens": 1}),
    ("/inference", {"prompt_ids": [999_999], "num_tokens": 1}),
    ("/inference", b"{"),
    ("/v1/completions", {"prompt": "a", "model": "other"}),
    ("/v1/completions", {"prompt": "a", "n": 3}),
    ("/v1/chat/completions", {"messages": []}),
]
READ = (
    "/v1/models",
    "/health",
    "/ready",
    "/nowhere",
    "/inference",
    "/openapi.json",
    "/stats?since=1",
)


@contextlib.contextmanager
def serving(tree: Path, mode: str, model: str) -> Iterator[str]:
    """The URL of a server of the code in `tree`."""
    port = free_port()
    program = "launch.py" if (tree / "launch.py").exists() else "app.py"  # as it once was
    command = [sys.executable, program, mode, "--model", model, "--port", str(port)]
    process = subprocess.Popen(command, cwd=tree, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until_ready(process, url := f"http://127.0.0.1:{port}")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def joined(raw: str) -> str:
    """A stream as its text by choice, and its events without text."""
    texts: dict[int, str] = {}
    rest = []
    for line in filter(None, raw.split("\n\n")):
        data = line.removeprefix("data: ")
        event: dict[str, Any] = {"done": True} if data == "[DONE]" else json.loads(data)
        for choice in event.get("choices") or [event]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice.get("index", -1)] = texts.get(choice.get("index", -1), "") + text
        if not event.get("choices") and "text" not in event:
            rest.append(event)
    return json.dumps([texts, rest], separators=(",", ":"))


def answers(url: str) -> dict[str, str]:
    """What a server answers to all of it, with times and ids masked."""
    found = {}
    for i, (route, body) in enumerate(SENT):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = requests.post(
            url + route, raw, headers={"Content-Type": "application/json"}, timeout=60
        )
        text = (
            joined(answer.text)
            if answer.headers["Content-Type"].startswith("text/event-stream")
            else answer.text
        )
        masked = IDS.sub('"id":"…"', TIMES.sub(r'"\1":…', text))
        found[f"POST {route} {raw.decode()[:60]} ({i})"] = f"{answer.status_code} {masked}"
    for route in READ:
        answer = requests.get(url + route, timeout=60)
        found[f"GET {route}"] = f"{answer.status_code} {TIMES.sub('…', answer.text)}"
    settings = requests.get(url, timeout=60).json()
    found["GET /"] = json.dumps({**settings, "pids": None, "config": None})
    found["settings"] = "\n".join(
        f"{name} {value}" for name, value in sorted(settings["config"].items()) if name != "port"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unchanged",
        description="Whether these servers answer what another commit's do.",
    )
    parser.add_argument("commit", help="the one to compare with")
    parser.add_argument(
        "--models", default="fake,demo", help="separated by commas (default: fake,demo)"
    )
    options = parser.parse_args()
    different = compared = 0
    with tempfile.TemporaryDirectory() as scratch:
        then = Path(scratch) / "then"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(then), options.commit],
            cwd=ROOT,
            check=True,
        )
        try:
            for model in options.models.split(","):
                for mode in MODES:
                    with serving(then, mode, model) as theirs, serving(ROOT, mode, model) as ours:
                        before, now = answers(theirs), answers(ours)
                    for what, old in before.items():
                        an_answer = what != "settings"  # a new one is told, and changes nothing
                        compared += an_answer
                        if old != (new := now[what]):
                            different += an_answer
                            lines = difflib.unified_diff(
                                old.splitlines(), new.splitlines(), "then", "now", lineterm="", n=0
                            )
                            print(f"{mode} on {model}, {what}:", *lines, sep="\n  ")
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(then)], cwd=ROOT, check=True
            )
    print(
        f"{compared} answers of {len(MODES)} modes, {options.models}, against commit "
        f"{options.commit}: {different} differ"
    )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
