"""Pictures of the live page in docs/live.md and docs/policies.md: simulated runs, in Chromium.

python -m benchmarks.screenshots [--out docs] [--only NAME]
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from client.machine import ROOT, commit
from client.traces import load_trace
from client.workloads import Workload
from live import page
from live.saved import serve_again
from simulate import simulation as simulate

EXAMPLES = "--costs second --trace docs/examples"
LOAD = "--numsamples 120 --arrival poisson:45 --max-batch-size 16"
# short and long ones, on few rows
MIXED = "--numsamples 24 --arrival poisson:90 --lengths lognormal:40:1:250 --max-batch-size 3"
WIDE, COLOURS = 1240, 128


class Shot(NamedTuple):
    """Variants of one run as a page shows them. high: how much of it, in pixels; clicked: where,
    so that this request stands out.
    """

    arguments: str  # of ./simulate.sh
    high: int
    clicked: tuple[int, int] | None = None


def of_mode(mode: str) -> Shot:
    return Shot(f"{LOAD} --modes {mode}", 640)


SHOTS = {
    **{mode: of_mode(mode) for mode in ("nobatch", "static", "windowed", "multibin", "dynamic")},
    "demand": Shot(
        f"{EXAMPLES}/demand.jsonl --max-batch-size 2 --kv-cache 3blocks --block-size 4 "
        f"--max-model-len 12 --variant whole=dynamic "
        f"--variant demand='dynamic --kv-reservation demand --watermark 0'",
        495,
    ),
    "srpt": Shot(f"{MIXED} --variant fcfs=dynamic --variant srpt='dynamic --order srpt'", 597),
    "mlfq": Shot(f"{MIXED} --variant fcfs=dynamic --variant mlfq='dynamic --order mlfq'", 597),
    "fair": Shot(
        f"{EXAMPLES}/fair.jsonl --max-batch-size 1 --variant fcfs=dynamic "
        f"--variant fair='dynamic --order fair'",
        460,
        clicked=(410, 373),
    ),
}


def html(arguments: str) -> str:
    """The page of a run."""
    options = simulate.parse(shlex.split(arguments))
    if options.trace:
        requests = load_trace(options.trace)
    else:
        data = Workload(options.lengths or "normal", seed=options.seed)
        requests = list(data.requests(options.numsamples, options.arrival or "burst"))
    return page.saved(
        [
            serve_again(name, options.config(name), options.costs, requests, f"commit {commit()}")
            for name in options.variants
        ]
    )


def main() -> None:
    from playwright.sync_api import sync_playwright  # of requirements-dev.txt

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.screenshots", description="Pictures of the live page."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--only", choices=SHOTS, metavar="NAME", help="one of them")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("error: there is no Chromium here: apt-get install chromium")
    out = options.out.resolve()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, shot in SHOTS.items():
            if options.only in (None, name):
                saved = Path(folder) / f"{name}.html"
                saved.write_text(html(shot.arguments))
                tab = browser.new_page(
                    viewport={"width": WIDE, "height": shot.high},
                    color_scheme="light",
                    reduced_motion="reduce",  # it opens at its end
                )
                tab.goto(saved.as_uri())
                tab.select_option("#x", "seconds", force=True)
                if shot.clicked:
                    tab.mouse.click(*shot.clicked)
                tab.evaluate("new Promise((done) => setTimeout(done, 500))")
                image = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
                tab.close()
                small = image.quantize(COLOURS, dither=Image.Dither.NONE)
                small.save(out / f"live-{name}.png", optimize=True)
                print(out / f"live-{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
