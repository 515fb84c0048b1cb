"""lab/benchmarks/gpu.sh on a CPU, and lab/studies/peers.py with fakes in the place of peers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from client.calls import ServerError
from config.settings import ConfigError
from lab.benchmarks import gpu
from lab.studies import peers
from tests.programs import ran
from tests.servers import ROOT


def test_every_part_gets_the_settings_that_it_knows() -> None:
    chosen = {"max_batch_size": 16, "loop_interval_ms": 1, "order": "sjf"}
    options = Namespace(rows="1", contexts="9", n=3, numsamples=5, **chosen)
    model = {"model": "gpt2", "model_name": "gpt2", "max_model_len": 1024}
    config: Any = SimpleNamespace(**model, dtype="float32", device="cuda", ahead=True)
    flags = ("--tokenizer", "--max-batch-size", "--loop-interval-ms", "--order")
    commands = gpu.commands(options, config, Path("out"), "NVIDIA H100 80GB HBM3")
    tokenizer, size, interval, order = flags
    found = {name: [word for word in words if word in flags] for name, words in commands.items()}
    assert found == {
        "agreement": [size, order], "steps": [size],
        "costs": [tokenizer, size], "burst": [size, interval, order], "comparison": [*flags],
        "simulated": [size, interval, order], "fidelity": [], "alone": [*flags],
        "prompts": [*flags],
    }  # fmt: skip
    assert str(ROOT / "results/costs/h100-gpt2.json") in commands["simulated"]
    assert "dynamic=dynamic --ahead" in commands["simulated"]


def test_all_parts_end_within_six_minutes_at_worst() -> None:
    """The first run on a GPU cut five parts, and those that need what these find found nothing."""
    assert sum(part.seconds for part in gpu.PARTS.values()) <= gpu.SECONDS
    assert gpu.SECONDS + gpu.STOP_S <= 360
    places = [*gpu.PARTS]
    assert places.index("costs") < places.index("comparison") < places.index("simulated")


def test_one_part_is_repeated(small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All shares are of the time that is left, which these parts do not take."""
    found = {"burst": "exit code 1: so it said"}
    seconds = {}

    def call(command: list[str], log: Path, limit: float) -> str | None:
        log.write_text(f"{log.stem} ran\n{{}}")
        seconds[log.stem] = limit
        return found.get(log.stem)

    monkeypatch.setattr(gpu, "call", call)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 0.0)  # takes its time
    out = tmp_path / "out"
    words = "lab.benchmarks.gpu", "--device", "cpu", *small.split(), "--out"
    assert ran(*words, str(out)).returncode == 1
    page = (out / "gpu.md").read_text()
    assert "```\nsteps ran\n```" in page and "Missing: burst** (exit code 1: so it said)" in page
    assert sum(seconds.values()) > 2 * gpu.SECONDS and seconds["agreement"] < gpu.SECONDS / 5
    found.clear()
    seconds.clear()
    (old := tmp_path / "old.json").touch()  # a GPU's costs do not lie in `out`
    monkeypatch.setattr(gpu, "fitted", lambda *_: old)
    assert ran(*words, str(out), "--only", "burst", "--only", "costs").returncode == 0
    assert not old.exists(), "`simulated` takes none where `costs` is cut"
    assert [*seconds] == ["costs", "burst"]
    page = (out / "gpu.md").read_text()
    assert "steps ran" in page and "Missing" not in page
    assert ran(*words, str(tmp_path / "new"), "--only", "alone").returncode == 0
    assert "**Missing: costs** (not in this run)" in (tmp_path / "new" / "gpu.md").read_text()
    for more, sentence in (
        (f"{out} --only burst --max-batch-size 3", "have other settings or another"),
        (f"{out} --only cublas", "--only cublas: the parts are agreement, steps"),
        (str(tmp_path), "holds no earlier run of this; choose another --out"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ran(*words, *more.split())


def test_targets_are_met_or_missed() -> None:
    bound: dict[str, Any] = {"context": 256, "memory_s": 2.5e-4, "arithmetic_s": 1e-4}
    steps = [
        bound | {"rows": n, "sampling": sampling, "seconds": factor * 5.25e-4}
        for n in (1, 8, 64)
        for sampling, factor in (("greedy", 1), ("drawn", 1 + 0.01 * n), ("top", 2))
    ]
    assert gpu.targets(steps, gpu.TARGETS["H200"]).splitlines()[2:] == [
        "| 1 | 0.25 | 0.53 | – | 0.50 (**missed**) | 1.01 | 2.00 | 1.05 (met) |",
        "| 8 | 0.25 | 0.53 | – | 0.60 (met) | 1.08 | 2.00 | 1.05 (**missed**) |",
        "| 64 | 0.25 | 0.53 | – | – | 1.64 | 2.00 | 1.05 (**missed**) |",
    ]
    assert gpu.targets(steps, {}).splitlines()[2].endswith("| 0.53 | – | – | 1.01 | 2.00 | – |")
    for step, seconds in zip(steps, (4e-4, 4.4e-4, 8e-4)):  # on a GPU, of a row
        step["of_sequence_s"] = seconds
    line = "| 1 | 0.25 | 0.53 | 0.40 | 0.50 (met) | 1.10 | 2.00 | 1.05 (**missed**) |"
    assert gpu.targets(steps, gpu.TARGETS["H200"]).splitlines()[2] == line


def test_the_page_shows_tables_that_follow_each_other_and_what_is_said_of_them(
    tmp_path: Path,
) -> None:
    """Of a comparison: what it measured, how full the servers were, and whether texts differ."""
    (folder := tmp_path / "alone").mkdir()
    blocks = ["# Title", "| a |", "| b |", "All 3 [texts](x.json) are the same.", "Not this."]
    (folder / "report.md").write_text("\n\n".join(blocks))
    shown = "[All of it](alone/report.md):\n\n| a |\n\n| b |\n\nAll 3 [texts](alone/x.json) are"
    assert gpu.found("alone", tmp_path) == f"{shown} the same."


DIES = "import os\nprint('so far')\nprint('{}')\nos.kill(os.getpid(), 9)"


@pytest.mark.nightly
def test_a_part_that_is_killed_leaves_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not said to have had too little time. Python buffers what it prints to a file."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("dies.py").write_text(DIES)
    problem = gpu.call(["dies"], tmp_path / "log", 100)
    assert problem and re.fullmatch("exit code (-9|137): so far", problem)


@pytest.mark.nightly
def test_ctrl_c_ends_the_part_that_runs(tmp_path: Path) -> None:
    code = "import sys, pathlib as p; from lab.benchmarks import gpu; "
    code += "gpu.call(['http.server', '0'], p.Path(sys.argv[1]), 100)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        while not (tmp_path / "log").exists() or "Serving" not in (tmp_path / "log").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        parts = psutil.Process(process.pid).children(recursive=True)
        assert len(parts) == 2, "timeout, and the part"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
        assert psutil.wait_procs(parts, timeout=5)[1] == []
    finally:
        process.kill()


@pytest.mark.nightly
def test_a_part_that_fails_is_told_from_one_that_ran(tmp_path: Path) -> None:
    failed = gpu.call(["lab.benchmarks.engine", "--rows", "x"], tmp_path / "log", 100)
    assert failed == "exit code 2: error: 'x' is no list of positive numbers such as 1,8,64"
    assert "positive numbers" in (tmp_path / "log").read_text()
    assert gpu.call(["lab.benchmarks.engine"], tmp_path / "log", -1.0) == "no time was left"
    endless = gpu.call(["http.server", "0"], tmp_path / "log", 1.0)
    assert endless == "its 1 s were not enough"


@pytest.mark.nightly
def test_an_environment_is_made_of_what_is_there(tmp_path: Path) -> None:
    """Without a network, and of an environment's packages; setup.sh finds nothing to do."""
    for name in ("lab/benchmarks/carry_wheels.sh", "setup.sh", "client/requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / "wheels").mkdir()
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "lab/benchmarks/carry_wheels.sh install && ROOT=. && . ./setup.sh requirements.txt"
    program = f"{script} && $PYTHON -c 'import flask, torch; print(torch.__file__)'"
    command = ["bash", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.endswith("torch/__init__.py\n")


def test_a_round_is_ours_and_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With interpreters that log what they run: ours says 30 tok/s, a peer 10, in int8 nothing."""
    log, fails = tmp_path / "log", 'case "$*" in *int8*) echo "no int8 here" >&2; exit 2; esac'
    for name, speech in (
        ("ours", "echo dynamic: 64 requests, 3,000.5 tok/s"),
        ("peer", f"{fails}; echo A peer 1.2, float32: 64 requests, 10.0 tok/s"),
    ):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "$@" >>{log}\n{speech}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "ours"))
    monkeypatch.setattr(peers, "native_bfloat16", lambda: True)
    of: Any = 1, str(tmp_path), *[str(tmp_path / "peer")] * 2
    with pytest.raises(ConfigError, match="make one by"):
        peers.cases(*of)
    (tmp_path / "config.json").touch()
    by_peer: dict[str, Any] = {case["peer"]: case for case in peers.cases(*of)}
    kept: Any = None
    found = [peers.run(by_peer["openvino --dtype bfloat16"], 1, seed, kept) for seed in range(2)]
    one = {"ours_per_s": 3000.5, "peer_per_s": 10.0, "ratio": 300.05, "version": "A peer 1.2"}
    assert found == [one, one]
    once = ["lab.benchmarks.burst --threads 2", "lab.benchmarks.peers.engines openvino"]
    same = f"--dtype bfloat16 --model {tmp_path} --n 1"
    assert log.read_text().splitlines() == [f"-m {p} {same}" for p in once + once[::-1]]
    with pytest.raises(ServerError, match=r"printed no tok/s; .* leave it out by --only: …no"):
        peers.run(by_peer["ctranslate2 --dtype int8"], 1, 0, kept)


@pytest.mark.parametrize(("arguments", "said"), [
    ("openvino", "No module named 'openvino'; install lab/benchmarks/requirements-peers.txt"),
    ("vllm --n 257", "--n must be from 1 to 256"),
    ("ctranslate2", "make it by python -m lab.benchmarks.peers.checkpoint"),
    ("vllm --dtype int8", "vllm computes in bfloat16 or float32 here"),
])  # fmt: skip
def test_bad_input_ends_with_a_sentence(arguments: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "openvino").mkdir()
    done = ran("lab.benchmarks.peers.engines", *arguments.split(), "--model", str(tmp_path))
    assert done.returncode == 2 and said in done.stderr
