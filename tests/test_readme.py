"""Every line of the shell blocks of README.md and docs/ is understood as it is written."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from client.client import parse as parse_client
from compare.options import MEANINGLESS
from compare.options import parse as parse_comparison
from compare.resume import options_of
from compare.servers import wait_until_ready
from config.config import Config
from config.flags import parse as parse_server
from config.settings import NOT_SIMULATED, flag
from generate.auto import resolve
from server import launch
from server.replicas import serve
from simulate.program import parse as parse_simulation
from simulate.simulation import ENGINE
from tests.programs import output, ran
from tests.servers import ROOT, Serve, free_port, launched
from tests.stub import stub

FIRST = ROOT / "README.md"
OWN_VLLM = ROOT / "tests" / "simulate" / "own_vllm.jsonl.gz"  # in the place of a reader's recording
GUIDES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "site")
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "lab/README.md", "lab/benchmarks/README.md")]
PAGES = [FIRST, ROOT / "results" / "README.md", *GUIDES, *OTHERS]
LINKING = [*PAGES, ROOT / "lab" / "proposals" / "README.md", ROOT / "generate/demo/README.md"]
TEXT = {page: page.read_text() for page in PAGES}
BLOCKS = [
    block for text in TEXT.values() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
]
LINES = dict.fromkeys(
    line.split(" #")[0].rstrip() for block in BLOCKS for line in block.splitlines() if line.strip()
)
FIELD = re.findall(r"^\|[^|]*\| `([^`|]+)` \|", TEXT[ROOT / "docs" / "field.md"], re.MULTILINE)
COMMANDS = [shlex.split(line) for line in LINES] + [
    shlex.split(cell if cell.startswith("./") else f"./server.sh {cell}") for cell in FIELD
]
SMALL = "--model fake --numsamples 4 --modes nobatch --skip-calibration --arrival burst"
PARSERS: dict[str, Callable[[list[str]], object]] = {
    "./server.sh": lambda argv: (
        "--help" in argv
        or (serve.read(argv) if launch.starts_replicas(argv) else parse_server(argv, resolve))
    ),
    "client/client.py": parse_client,
    "./compare.sh": lambda argv: (
        options_of(argv, parse_comparison, "./compare.sh")
        if "--check" in argv
        else parse_comparison(argv)
    ),
    "./simulate.sh": parse_simulation,
}


def of(program: str) -> list[list[str]]:
    return [command[command.index(program) + 1 :] for command in COMMANDS if program in command]


def test_the_readme_shows_each_program() -> None:
    scripts = {program for program in PARSERS if program.endswith(".sh")}
    others = {"./playground.sh", "./test.sh", "lab/again.sh", "lab/test.sh"}
    others |= {"python", "curl", "cp", "PYTHONPATH=.", "PYTHONPATH=.:simulate/vllm"}
    assert {command[0] for command in COMMANDS} == scripts | others


@pytest.mark.parametrize("program", PARSERS)
def test_commands_are_understood(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "check_replicas", lambda n: None)  # Ray may be missing here
    assert of(program)
    for argv in of(program):
        argv = [str(OWN_VLLM) if word == "vllm.jsonl" else word for word in argv]
        if ".py:" not in " ".join(argv):  # files are loaded with the settings: test_user_policies
            PARSERS[program](argv)


@pytest.mark.usefixtures("undrawn")
def test_the_report_command(tmp_path: Path) -> None:
    assert ["python", "-m", "compare.report", "runs/DATE-TIME"] in COMMANDS
    with stub() as other:
        load = f"--url {other.url} --api openai --numsamples 3 --arrival burst --lengths fixed:2"
        load += f" --quiet --out {tmp_path} --figure {tmp_path}/figure.png"
        output("client.client", load)
    (tmp_path / "report.html").unlink()
    output("compare.report", str(tmp_path))
    assert (tmp_path / "report.html").exists()


NO_MEANING = {
    "compare": {*MEANINGLESS},
    "simulate": {*NOT_SIMULATED, *ENGINE} - {"fake_slowdown"},
}


@pytest.mark.parametrize(("program", "left_out"), NO_MEANING.items())
def test_help_lists_the_settings_that_have_a_meaning(program: str, left_out: set[str]) -> None:
    """./compare.sh listed --host and --port, and ./simulate.sh dozens that it refuses."""
    listed = re.findall(r"^  (--[\w-]+)", ran(program, "--help", "all").stdout, re.MULTILINE)
    settings = {name for name in Config.model_fields if flag(name) in listed}
    assert settings == {*Config.model_fields} - {"mode"} - left_out


ANSWERS = [  # parts of each curl command's answer, in the order of the pages
    ['"completion"', '"cached_tokens":0'],
    ['"index":0', "data: [DONE]", '"prompt_tokens_details":{"cached_tokens":0}'],
    ['"text_completion"', '"index":1'],
    [
        "vllm:num_requests_running",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    ],
    ['"seed":[7,', '"prompt_tokens":11,', '"completion_tokens":60'],
    ['"text_completion"', '"cached_tokens":0'],
    ['"text_completion"', '"cached_tokens":16'],
    ['"text_completion"', '"cached_tokens":0'],
    ["{}"],
    ['"token_logprobs":[', '"top_logprobs":[{', '"text_offset":['],
    ['"text":"If the file"', '"token_logprobs":[null,', '"completion_tokens":0'],
    ['"chat.completion"', '"top_logprobs":[{'],
    ['"completion"', '"paused_s":0.0'],
    ['"ann":{"completed":1,', '"prompt_tokens":11,"completion_tokens":20,', '"priorities":{"0":'],
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_commands(shared_server: Serve) -> None:
    with shared_server("dynamic", {"model": "demo", "prefix_caching": True}) as url:
        for curl, expected in zip(of("curl"), ANSWERS, strict=True):
            command = ["curl", "-sN", *(word.replace("localhost:8500", url) for word in curl)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert [each for each in expected if each not in answer] == [], (curl, answer)


def test_the_scripts_themselves_run(tmp_path: Path) -> None:
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip("the scripts make .venv; run ./test.sh to try them")
    out = tmp_path / "out"
    command = [str(ROOT / "compare.sh"), *SMALL.split(), "--out", str(out)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    assert (out / "report.md").exists()
    port = str(free_port())
    with launched("./server.sh", "dynamic", "--model", "fake", "--port", port) as process:
        wait_until_ready(process, f"http://127.0.0.1:{port}")


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in LINKING:
        links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text())
        for path, anchor in links:
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name} links to {path}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_results_are_few_and_each_figure_is_on_a_page() -> None:
    files = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 6e6
    pages = {file: file.read_text() for file in files if file.suffix == ".md"} | TEXT
    shown = {
        (page.parent / path).resolve()
        for page, text in pages.items()
        for path in re.findall(r"\]\(([^)]+\.png)\)", text)
    }
    assert {file for file in files if file.suffix == ".png"} <= shown


def test_the_first_page_and_the_marked_path_are_short_and_settings_exist() -> None:
    first = TEXT[FIRST].splitlines()
    assert len(first) <= 120
    assert all(len(line) <= 100 for line in first if not re.match(r"[|!<]|curl ", line))
    rows = [row.split() for row in TEXT[ROOT / "docs" / "reading.md"].split("```")[1].split("\n")]
    marked = [(ROOT / row[0], int(row[1])) for row in rows if row]
    lines = [line for file, _ in marked for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 1800 and sum(minutes for _, minutes in marked) <= 66, "about an hour"
    settings = TEXT[ROOT / "docs" / "settings.md"]
    ours = re.findall(r"^\| `(\w+)", settings.split("## What others call them")[1], re.MULTILINE)
    assert set(ours) <= {*Config.model_fields}
