"""How smoothly the live page draws, and how much memory it and a server's history take.

    python -m benchmarks.live_page [--rows 256] [--rate 100] [--seconds 6] [--iterations 360000]

Frames: a page that is told of --rate iterations a second, as often as it asks, while requests come
and go as the page's own load makes them; the same ones in each view, without a server beside it.
Memory: --iterations more (an hour at 100 a second), as fast as both sides can: a process notes them
and is polled, and Chromium's page takes what it was told. The page runs in Debian's Chromium,
without a window and without a GPU. Five minutes, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.busy import COMPLETION, POLLS, PROMPT, Busy, serve
from client.data import save_json
from client.machine import command_line, processor, stamp
from client.report.tables import markdown
from config import Config, build
from live import page
from live.history import KEPT

TENTHS = 10
# iterations in sight, and the keys that lead there from the 240 that a page begins with
ZOOMS = {60: "++++", 240: "", KEPT: "0"}

# to be asked is all that the page wants of a network: nobody answers
DEAF = "window.fetch = () => new Promise(() => {})"
TAKE = "(texts) => texts.forEach((text) => liveForTests.feed(JSON.parse(text)))"
# at the pace at which it happened; of each frame when it began and how long it took, in ms
WATCH = """async ([texts, every]) => {
  const {frame} = draw, frames = [], began = performance.now();
  draw.frame = function (time) {
    const start = performance.now();
    frame.call(this, time);
    frames.push([start - began, performance.now() - start]);
  };
  for (const [i, text] of texts.entries()) {
    const early = began + (i + 1) * every - performance.now();
    await new Promise((resolve) => setTimeout(resolve, early));
    liveForTests.feed(JSON.parse(text));
  }
  return frames;
}"""


def open_page(browser: Browser, path: Path) -> Any:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.add_init_script(DEAF)
    tab.goto(path.as_uri())
    return tab


def frames(browser: Browser, path: Path, config: Config, options: Any) -> list[dict[str, Any]]:
    """Of each view: frames a second, and how much of a frame's time the page's script takes."""
    busy, found = Busy(config, options.rate), []
    for _ in busy.polls(KEPT):  # so that all that a page keeps is there
        pass
    before = busy.anew()
    texts = list(busy.polls(round(options.rate * options.seconds)))
    for axis in ("iterations", "seconds"):
        for zoom, keys in ZOOMS.items():
            tab = open_page(browser, path)
            tab.evaluate(TAKE, [before])
            for key in [*keys, *("t" if axis == "seconds" else "")]:
                tab.keyboard.press(key)
            drawn = tab.evaluate(WATCH, [texts, 1e3 / POLLS])
            state = tab.evaluate("liveForTests.state()")
            assert state["errors"] == 0, "the page's script failed"
            tab.close()
            seconds = Counter(int(at / 1e3) for at, _ in drawn)
            a_second = [seconds[second] for second in range(int(options.seconds))]
            found.append(
                {
                    "axis": axis,
                    "in_sight": zoom,
                    "iterations": state["next"] - KEPT,
                    "a_second": a_second,
                    "script_ms": statistics.median(took for _, took in drawn),
                    "longest_script_ms": max(took for _, took in drawn),
                }
            )
            print(f"x {axis}, {zoom} iterations in sight: {a_second} frames a second", flush=True)
    return found


def memory(browser: Browser, path: Path, config: Config, options: Any) -> list[dict[str, Any]]:
    """Of each tenth of the iterations: what the server's process and the page have by then."""
    tenth = options.iterations // TENTHS
    spawn, found = multiprocessing.get_context("spawn"), []
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=serve, args=(config, options.rate, [tenth] * TENTHS, sender))
    process.start()
    sender.close()  # so that a process that fails ends this one, too
    tab = open_page(browser, path)
    devtools = tab.context.new_cdp_session(tab)
    for _ in range(TENTHS):
        while isinstance(told := receiver.recv(), str):
            tab.evaluate(TAKE, [told])
        devtools.send("HeapProfiler.collectGarbage")
        heap = devtools.send("Runtime.getHeapUsage")
        state = tab.evaluate("liveForTests.state()")
        found.append(
            {
                "iterations": state["next"],
                "server_mb": told / 1e6,
                "page_mb": (heap["usedSize"] + heap["backingStorageSize"]) / 1e6,
                "page_requests": state["requests"],
            }
        )
        print(found[-1], flush=True)
    process.join()
    tab.close()
    return found


def report(found: dict[str, Any], options: Any, made: dict[str, Any]) -> str:
    drawn = [
        ["x", "iterations in sight", "frames a second, median", "in the slowest", "script, ms"]
    ]
    for view in found["frames"]:
        a_second = view["a_second"]
        figures = [f"{statistics.median(a_second):.0f}", str(min(a_second))]
        script = f"{view['script_ms']:.1f}"
        drawn.append([view["axis"], f"{view['in_sight']:,}", *figures, script])
    kept = [["iterations", "page, MB", "requests that it knows", "server, MB"]]
    for tenth in found["memory"]:
        figures = [f"{tenth['page_mb']:.1f}", f"{tenth['page_requests']:,}"]
        kept.append([f"{tenth['iterations']:,}", *figures, f"{tenth['server_mb']:.1f}"])
    command = command_line("python", ["-m", "benchmarks.live_page", *sys.argv[1:]])
    return (
        "# What the live page draws and keeps\n\n"
        f"Synthetic events: {options.rows} rows, all of them taken, by requests of {PROMPT[0]} to "
        f"{PROMPT[1]} prompt and {COMPLETION[0]} to {COMPLETION[1]} completion tokens, in the page "
        f"{POLLS} times a second. Headless Chromium {found['chromium']}, 1280 × 900, no GPU.\n\n"
        f"Drawn at {options.rate:g} iterations a second for {options.seconds:g} s in each view; "
        "script: the median of what the page's own script takes for a frame.\n\n"
        f"{markdown(drawn, left=1)}\n\n"
        f"Kept while {options.iterations:,} iterations are taken as fast as it goes: the page's "
        "heap and arrays once its garbage is collected, and the process of a history that is "
        "polled.\n\n"
        f"{markdown(kept, left=0)}\n\n{processor(made['hardware'], {})}, `{command}`, commit "
        f"{made['commit']}, {made['date']}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_page",
        description="How smoothly the live page draws, and how much memory it takes.",
    )
    parser.add_argument("--rows", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--rate", type=float, default=100, help="iterations a second (default: 100)"
    )
    parser.add_argument("--seconds", type=float, default=6, help="of each view (default: 6)")
    parser.add_argument("--iterations", type=int, default=360_000, help="in memory's part")
    parser.add_argument("--out", type=Path, default=Path("runs") / "live", help="folder")
    options = parser.parse_args()
    config = build("dynamic", {"model": "fake", "max_batch_size": options.rows}, {})
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("error: there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "live.html"
        path.write_text(page.empty())
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        found = {
            "chromium": browser.version,
            "frames": frames(browser, path, config, options),
            "memory": memory(browser, path, config, options),
        }
        browser.close()
    made = stamp()
    text = report(found, options, made)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "page.md").write_text(text)
    save_json(options.out / "page.json", found | made)
    print(text)


if __name__ == "__main__":
    main()
