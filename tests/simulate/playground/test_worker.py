"""The playground's runs, on CPython, beside the simulator's; and what its editor's text does."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from client.traces import load_trace
from scheduling import user_policies
from scheduling.policies import MODES, ORDERS
from simulate.costs import FOLDER, load
from simulate.playground import build, worker
from simulate.playground.build import BURST, ESTIMATES, MOST_BYTES, BuildError, settings
from simulate.playground.serve import Handler, Server
from simulate.program import parse
from simulate.server import SimulatedServer
from tests.servers import wait_until

STATE = BURST | {"costs": "demo", "rate": 60.0, "requests": 40}
TRACE = ("--trace", "trace.jsonl")
VARIANTS = ["static", "windowed", "dynamic --order sjf", "dynamic --kv-reservation demand"]


def simulated(command: str, trace: Path) -> list[list[list[float]]]:
    """Return each variant's answers, by the command that the page shows and its trace."""
    words = shlex.split(command)[1:]
    options = parse([str(trace) if word == "trace.jsonl" else word for word in words])
    servers = [
        SimulatedServer(name, options.config(name), options.costs, stream=options.stream)
        for name in options.variants
    ]
    answers = [
        [each for each in server.replay(load_trace(trace)) if not each.error] for server in servers
    ]
    return [
        [[a.request.id, a.first_token_at, a.last_token_at, a.ended_at] for a in of]
        for of in answers
    ]


@pytest.fixture(scope="module")
def built() -> tuple[worker.Settings, dict[str, Any]]:
    return settings()


@pytest.fixture(scope="module")
def of_costs(built: tuple[worker.Settings, dict[str, Any]]) -> worker.Settings:
    return built[0]


@pytest.fixture(scope="module")
def menu(built: tuple[worker.Settings, dict[str, Any]]) -> dict[str, Any]:
    return built[1]


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"costs": ESTIMATES[0], "stream": True, "blocks": 64, "rows": 8, "budget": 32, "seed": 1},
        {"costs": "h100-llama-3.1-8b", "rate": 60},  # planned ahead
    ],
)
def test_a_run_is_that_of_simulate_sh_to_the_picosecond(
    other: dict[str, Any], of_costs: worker.Settings, menu: dict[str, Any], tmp_path: Path
) -> None:
    costs = other.get("costs", "demo")
    state = STATE | menu[costs]["usual"] | {"rate": 60.0} | other | {"variants": VARIANTS}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(worker.jsonl(state))
    results = [worker.served(variant, state, of_costs) for variant in VARIANTS]
    answers = [sorted(result["answers"]) for result in results]
    assert answers == simulated(worker.command(state), trace)


def test_each_model_of_the_menu_serves_its_requests_with_vllms_settings(
    of_costs: worker.Settings, menu: dict[str, Any]
) -> None:
    """And ./simulate.sh takes the command with all sliders at an end."""
    files = {path.stem for path in FOLDER.glob("*.json")}
    assert menu.keys() == of_costs.keys() == files | set(ESTIMATES)
    pairs = [(each["model"], each["gpu"]) for each in menu.values()]
    assert len(set(pairs)) == len(pairs)
    assert ("Llama-3.1-8B", "H100") in pairs and ("Qwen3-32B", "2 × RTX PRO 6000") in pairs
    assert "PCIe" in menu["rtx-pro-6000-qwen3-32b-tp2"]["doubts"]
    for name, each in menu.items():
        state = STATE | each["usual"] | {"costs": name, "requests": 500, "tokens": 10}
        result = worker.served("dynamic", state, of_costs)
        times = [time for _, *times in result["answers"] for time in times]
        assert len(times) == 3 * 500 and all(map(math.isfinite, times)), name
    for name, end in itertools.product(("h100-llama-3.1-8b", "a100-qwen3-8b", "demo"), (0, -1)):
        ends = {slider: int(of[end]) for slider, of in menu[name]["ranges"].items()}
        state = STATE | menu[name]["usual"] | ends | {"costs": name, "variants": ["dynamic"]}
        words = [word for word in shlex.split(worker.command(state))[1:] if word not in TRACE]
        assert parse(words).config("a").max_batch_size == ends["rows"]
    h100 = menu["h100-llama-3.1-8b"]["usual"]
    assert (h100["rows"], h100["budget"], h100["blocks"]) == (1024, 8192, 28327)


def test_costs_of_a_readers_own_are_a_file_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--costs mine.json became --costs mine, which ./simulate.sh does not know, and demo.json the
    repository's demo; and of a short context ./simulate.sh left requests out. One that does not
    say where it was measured ended with a traceback.
    """
    costs = json.loads((FOLDER / "demo.json").read_text())
    costs["config"]["max_model_len"] = 64
    (tmp_path / "demo.json").write_text(json.dumps(costs))
    bare = {name: costs[name] for name in ("unit", "products", "decode", "prompts")}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    (few := tmp_path / "few").mkdir()
    shutil.copy(FOLDER / "demo.json", few)
    monkeypatch.setattr(build, "FOLDER", few)
    monkeypatch.chdir(tmp_path)
    of_costs, shown = settings(Path("demo.json"))
    state = STATE | shown["demo.json"]["usual"] | {"costs": "demo.json", "variants": ["dynamic"]}
    (tmp_path / "trace.jsonl").write_text(worker.jsonl(state))
    assert state["longest"] == 32
    assert {"demo", "demo.json"} < shown.keys() == of_costs.keys()
    assert build._origin(load(tmp_path / "bare.json")).startswith("bare, of a file that does not")
    answers = worker.served("dynamic", state, of_costs)["answers"]
    assert [sorted(answers)] == simulated(worker.command(state), tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--costs", "gpt2"], "no file gpt2; all of"), (["--out", "taken"], "taken cannot be writ")],
)
def test_what_cannot_be_built_is_a_sentence(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was a traceback, and the second a lack of Node.js."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(build, "pyodide", lambda folder: folder.mkdir(parents=True))
    monkeypatch.setattr("sys.argv", ["build", *flags])
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        build.main()


def test_the_page_says_what_is_cut() -> None:
    """In the grid a long run ended early, and answers "400 tokens on average" were shorter."""
    folder = Path(worker.__file__).parent
    index, page = ((folder / name).read_text() for name in ("index.html", "page.js"))
    assert f"its first {worker.GRID:,}\n" in index
    assert f"more than {worker.LONGEST:,} tokens" in page


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder for the editor's text, and the tables of modes and orders as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(user_policies, "PROBLEMS", {})
    yield
    worker.learn("")


ORDER = """from scheduling.policies.orders import Order
class Mine(Order):
    in_order = False
    def key(self, inference):
        return {}
"""


def test_a_policy_is_learnt_anew_with_its_errors(editor: None, of_costs: worker.Settings) -> None:
    mine = "dynamic --order yours.py:Mine"
    state = STATE | {"rows": 2}
    for key, same in (("-inference.num_tokens", False), ("inference.num_tokens", True)):
        learnt = {"modes": [], "orders": ["yours.py:Mine"], "error": ""}
        assert worker.learn(ORDER.format(key)) == learnt
        sjf = worker.served("dynamic --order sjf", state, of_costs)["answers"]
        assert (worker.served(mine, state, of_costs)["answers"] == sjf) is same
    worker.learn(ORDER.format("1 / 0"))
    error = worker.served(mine, state, of_costs)["error"]
    assert error.endswith("ZeroDivisionError: division by zero (yours.py, line 5)")
    assert worker.learn("x = 1\nx = = 2")["error"].endswith("(yours.py, line 2)")
    assert "yours.py:Mine" not in {*MODES, *ORDERS}
    assert worker.served(mine, state, of_costs) == {"error": "there is no yours.py:Mine"}


def test_without_npm_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="install Node"):
        build.build(tmp_path / "site")
    assert not (tmp_path / "site").exists()


# ---- in a real browser: Pyodide in Debian's Chromium, driven by Playwright

PATIENCE_S = 120  # Pyodide loads in seconds, and in a minute beside other tests


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    try:
        assert build.build(folder) < MOST_BYTES
    except BuildError as error:
        pytest.skip(str(error))
    with Server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def comes_true(tab: Any, condition: str) -> None:
    wait_until(lambda: bool(tab.evaluate(condition)), PATIENCE_S, every_s=0.1)


DONE = "document.getElementById('state').textContent.includes('simulated in')"
WATCHED = """addEventListener("DOMContentLoaded", () => {
  const state = document.getElementById("state"), all = {childList: true};
  window.said = [];
  if (state) new MutationObserver(() => said.push(state.textContent)).observe(state, all);
});"""


@pytest.mark.extra
@pytest.mark.alone  # a run in it takes a core
def test_it_shows_what_simulate_does(site: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    """While Python is loaded a percentage grows: it said "14 MB" for half a minute."""
    tab = opened("about:blank")
    tab.add_init_script(WATCHED)
    tab.goto(f"{site}#costs=gpt2&rate=5&requests=60&stream=1&v=static&v=dynamic+--order+sjf")
    comes_true(tab, DONE)
    *loading, starting, done = dict.fromkeys(tab.evaluate("said"))
    assert starting == "starting Python …" and "simulated in" in done
    percents = [int(each) for each in re.findall(r"loading Python: (\d+)% of", " ".join(loading))]
    assert len(percents) == len(loading) > 3 and percents == sorted(percents) and percents[-1] < 100
    comes_true(tab, "document.getElementById('live').className === 'known'")
    with tab.expect_download() as download:
        tab.click("#trace")
    download.value.save_as(trace := tmp_path / "trace.jsonl")
    found = "playgroundForTests.results.map((result) => result.answers)"
    answers = tab.evaluate(found)
    assert len(answers[0]) == 60
    wanted = simulated(tab.inner_text("#command"), trace)
    assert [sorted(of_variant) for of_variant in answers] == wanted
    tab.evaluate("navigator.serviceWorker.ready.then(() => 0)")
    tab.context.set_offline(True)
    tab.reload()
    comes_true(tab, DONE)
    assert tab.evaluate(found) == answers


CODE = """from scheduling.policies.orders import Order%0A
class Mine(Order):%0A    def key(self, inference):%0A        return 1 / 0%0A""".replace("\n", "")


@pytest.mark.extra
@pytest.mark.alone  # a run in it takes a core
def test_a_policy_from_a_link_runs_by_a_click_alone(site: str, opened: Callable[..., Any]) -> None:
    tab = opened(f"{site}#v=dynamic&v=dynamic+--order+yours.py:Mine&code={CODE}")
    comes_true(tab, DONE)
    assert tab.is_visible("#foreign") and "Run it" in tab.inner_text("#variants")
    assert "ZeroDivisionError" not in tab.inner_text("body")
    tab.click("#run")
    comes_true(tab, "document.querySelector('#lines .at')?.textContent === '4'")
    assert "ZeroDivisionError" in tab.inner_text("#wrong")
    more = "\n\nclass Other(Mine): pass"
    tab.fill("#code", tab.input_value("#code").replace("1 / 0", "inference.id") + more)
    comes_true(tab, f"!document.getElementById('wrong').textContent && {DONE}")
    comes_true(tab, "playgroundForTests.results[1].answers?.length === 300")
    assert tab.inner_text("#unused").strip() == "Other is in no variant yet: add it"
    tab.click("#unused button")
    comes_true(tab, "playgroundForTests.results[2]?.answers?.length === 300")
    assert tab.inner_text("#unused") == ""


KNOWN = "document.getElementById('live').className === 'known'"


@pytest.mark.extra
@pytest.mark.alone  # a run in it takes a core
def test_the_page_goes_on_after_a_policy_that_exits(site: str, opened: Callable[..., Any]) -> None:
    """It hung, as after one that fails when its rows are shown; and a tick took the focus."""
    tab = opened(f"{site}#requests=20&v=dynamic")
    comes_true(tab, KNOWN)
    tick = tab.locator("#variants input").first
    tick.focus()
    tab.keyboard.press("Space")
    comes_true(tab, f"!({KNOWN})")  # rows of no variant
    assert tab.evaluate("document.activeElement.type") == "checkbox"
    tab.fill("#code", "raise SystemExit(3)")
    comes_true(tab, "document.getElementById('wrong').textContent.endsWith('SystemExit: 3')")
    tab.click("#add")
    comes_true(tab, "playgroundForTests.results[1]?.answers?.length === 20")


@pytest.mark.extra
def test_another_version_replaces_files_that_the_browser_kept(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hosts allow it to, for ten minutes: files of the old version became the new one's."""

    def put(version: int) -> None:
        (tmp_path / "index.html").write_text(f"<title>{version}</title>")
        script = Path(worker.__file__).with_name("offline.js").read_text()
        begin = f'const VERSION = "playground-{version}", FILES = ["./"];\n'
        (tmp_path / "offline.js").write_text(begin + script)

    def end_headers(handler: Handler) -> None:
        handler.send_header("Cache-Control", "max-age=600")
        SimpleHTTPRequestHandler.end_headers(handler)

    monkeypatch.setattr(Handler, "end_headers", end_headers)
    with Server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        put(1)
        tab = opened(f"http://127.0.0.1:{server.server_port}/")
        for version in (1, 2):
            put(version)
            tab.evaluate("navigator.serviceWorker.register('offline.js').then((it) => it.update())")
            kept = f"caches.keys().then((names) => String(names) === 'playground-{version}')"
            comes_true(tab, kept)
        tab.reload()
        assert tab.title() == "2"
        server.shutdown()
