"""Every benchmark at a small size: what it serves, what its last line holds, and what it says to
bad settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import kernels
from benchmarks import (
    agreement,
    burst,
    engine,
    gpu,
    huggingface,
    long_prompt,
    pairs,
    quantization,
    scheduler,
)
from benchmarks.common import run
from benchmarks.workload import draw
from client.traces import load_trace
from config import ConfigError, build
from generate import load_generator
from tests.servers import wait_until


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a tiny model with GPT-2's vocabulary and context."""
    folder = tmp_path_factory.mktemp("small")
    folder.joinpath("config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32})
    )
    return ["--model", str(folder), "--weights", "random", "--dtype", "float32", "--threads", "1"]


def last_line(
    main: Callable[[], None], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["commit"] and found["hardware"]["cpu"]
    return found


def test_the_burst_is_the_peers_burst() -> None:
    requests = draw()
    assert sum(tokens for _, tokens in requests) == 6904 and draw(16) == requests[:16]
    digest = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
    assert digest == "c35044afddcfb7aac5fa6016f150313ea3977fc65f35bfc168fd1b90038b8535"


def test_the_burst_reports_every_mode_and_where_the_time_went(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = last_line(
        burst.main, [*small, "--n", "6", "--modes", "dynamic,static"], monkeypatch, capsys
    )
    assert found["config"]["model"] == Path(small[1]).name and small[1] not in found["command"]
    assert list(found["modes"]) == ["dynamic", "static"] and found["config"]["max_batch_size"] == 6
    for mode in found["modes"].values():
        assert mode["completion_tokens"] == sum(tokens for _, tokens in draw(6))
        assert mode["output_throughput"] == pytest.approx(
            mode["completion_tokens"] / mode["wall_clock_s"]
        )
        assert all(seconds >= 0 for seconds in mode["phases_s"].values())
        assert sum(mode["phases_s"].values()) <= mode["timed_wall_clock_s"]


def test_the_burst_is_measured_beside_busy_neighbours(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = [*small, "--n", "2", "--neighbours", "2"]
    found = last_line(burst.main, arguments, monkeypatch, capsys)["modes"]["dynamic"]
    turns = found["neighbours"]
    assert turns["loops"] == 2 and len(turns["alone"]) == len(turns["beside"]) == burst.TURNS
    assert turns["median_left"] > 0 and "phases_s" not in found
    loops = [process for process in psutil.Process().children() if burst.LOOP in process.cmdline()]
    assert not loops, "they end with their turn"


def test_a_neighbour_ends_with_its_benchmark_however_that_ends() -> None:
    another = os.getppid()  # it is a child of this process, and told to look for another
    loop = subprocess.run([sys.executable, "-c", burst.LOOP, str(another)], timeout=10)
    assert loop.returncode == 0


def test_the_bursts_requests_can_be_saved_for_a_comparison(
    small: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["burst", *small, "--n", "5", "--save-trace", str(tmp_path / "trace.jsonl")]
    )
    burst.main()
    assert [(r.prompt_ids, r.num_tokens) for r in load_trace(tmp_path / "trace.jsonl")] == draw(5)


def test_a_step_is_compared_with_what_the_machine_allows(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setitem(engine.PROBE_WIDTH, "cpu", 128)
    arguments = [
        "--rows",
        "1,3",
        "--contexts",
        "20,70",
        "--prompts",
        "5,33",
        "--repeats",
        "2",
        "--out",
        str(tmp_path),
    ]
    arguments += [*small, "--max-batch-size", "9"]
    found = last_line(engine.main, arguments, monkeypatch, capsys)
    assert [(step["rows"], step["context"]) for step in found["steps"]] == [
        (1, 20),
        (3, 20),
        (1, 70),
        (3, 70),
    ]
    one, more = found["steps"][0], found["steps"][3]
    assert 0 < one["bytes"] < more["bytes"]
    assert all(step["memory_s"] > 0 and step["arithmetic_s"] > 0 for step in found["steps"])
    assert all(0 < s["reached_least"] <= s["reached"] <= s["reached_most"] for s in found["steps"])
    assert [step["prompt_tokens"] for step in found["with_a_prompt"]] == [5, 33]
    assert (tmp_path / "step_time.png").stat().st_size > 10_000


@pytest.mark.parametrize("step_bytes", [80_000, 8_000])
def test_as_many_bytes_are_read_as_a_step_reads(
    monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    """Of a large array reading is slower than of one that caches hold."""
    monkeypatch.setitem(engine.PROBE_WIDTH, "cpu", 128)
    read: list[int] = []
    monkeypatch.setattr(engine.Machine, "_read", lambda _, words: read.append(words.nbytes))
    machine = engine.Machine(build("dynamic", {"model": "fake"}, {}), 80_000, rows=1)
    machine.bound(step_bytes, flops=1)
    assert {*read} == {step_bytes}


def test_a_step_is_held_against_the_faster_probe_beside_it(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that reads, then reads twice as fast, then multiplies slowly; steps of 10 s."""
    config = build("dynamic", {"model": small[1], "weights": "random", "dtype": "float32"}, {})
    bounds = iter([(4.0, 1.0), (2.0, 1.0), (4.0, 6.0), (4.0, 3.0)])
    machine = SimpleNamespace(bound=lambda n_bytes, flops: next(bounds))

    def steps(generator: Any, rows: Any, repeats: int, between: Callable[[], Any]) -> Any:
        return ((10.0, between()) for _ in range(repeats))

    monkeypatch.setattr(engine, "timed_steps", steps)
    found = engine.against_bound(Any, machine, config, 1, 20, repeats=3)  # type: ignore[arg-type]
    assert [found[name] for name in ("reached_least", "reached", "reached_most")] == [0.2, 0.2, 0.4]
    assert found["memory_s"] == 2.0 and found["arithmetic_s"] == 1.0 and found["seconds"] == 10.0


def test_the_reader_reads_all_of_an_array() -> None:
    words = torch.randint(-(2**62), 2**62, (100_003,), generator=torch.Generator().manual_seed(0))
    for n in (0, 1, 63, 64, 32_768, 100_003):
        assert kernels.load().read_int64(words.data_ptr(), n, 2) == int(words[:n].sum())


@pytest.mark.nightly
def test_what_int8_gives_is_measured_by_rows_and_on_a_small_pool(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    assert quantization.alone(os.getpid) != os.getpid()
    monkeypatch.setattr(quantization, "alone", lambda function, *given: function(*given))
    sizes = ["--rows", "1,3", "--contexts", "20", "--rounds", "1", "--pool-gb", "0.001"]
    arguments = [*small, *sizes, "--max-batch-size", "64", "--out", str(tmp_path)]
    found = last_line(quantization.main, arguments, monkeypatch, capsys)
    assert [(step["context"], step["rows"]) for step in found["steps"]] == [(20, 1), (20, 3)]
    for step in found["steps"]:
        gains = step["gains"]
        assert list(gains) == ["linear int8", "kv int8", "both int8", "plain again"]
        assert {len(each) for each in gains.values()} == {quantization.TURNS}
    plain, linear, kv, both = found["pools"].values()
    # a token of two heads of 16 takes 160 bytes instead of 512
    assert plain["kv_blocks"] == linear["kv_blocks"] == 122 and kv["kv_blocks"] == 390
    assert both["rows"] > 1.5 * plain["rows"] and both["iterations"] < plain["iterations"]
    page = (tmp_path / "quantization.md").read_text()
    assert "\n| 20 | 3 | " in page and f"\n| both int8 | 390 | {both['rows']:.1f} | " in page
    assert (tmp_path / "quantization.png").stat().st_size > 10_000


def test_a_long_prompt_is_measured_over_budgets(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    found = last_line(
        long_prompt.main,
        [*small, "--budgets", "300,900", "--out", str(tmp_path)],
        monkeypatch,
        capsys,
    )
    assert [point["token_budget"] for point in found["points"]] == [300, 900]
    assert all(
        point["longest_itl_s"] >= point["median_itl_s"] > 0 < point["ttft_s"]
        for point in found["points"]
    )
    assert (tmp_path / "long_prompt.png").stat().st_size > 10_000


def test_the_engine_is_held_against_the_oracle(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sizes = ["--decoder-batch-sizes", "32,3", "--prefix-caching"]  # the long ones begin alike
    arguments = [*small, "--n", "4", "--tokens", "5", *sizes]
    found = last_line(agreement.main, arguments, monkeypatch, capsys)
    assert found["agrees"] and found["float32"] == {
        "requests": 12,
        "equal": 12,
        "undecided": 0,
        "different": 0,
    }
    assert 0 < found["bfloat16"]["largest_difference"] < found["bfloat16"]["tolerance"]
    monkeypatch.setattr(agreement, "load_generator", spoilt(load_generator))
    with pytest.raises(SystemExit) as caught:
        last_line(agreement.main, arguments, monkeypatch, capsys)
    assert caught.value.code == 1, "an engine with other weights is noticed"


def spoilt(load: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(config: Any, *rest: Any) -> Any:
        other = config.model_copy(update={"weights_seed": 1})
        return load(config if config.generator == "naive" else other, *rest)

    return wrong


@pytest.mark.nightly
def test_all_that_is_claimed_of_a_gpu_is_reported_or_said_to_be_missing(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    mains = {
        "benchmarks.agreement": agreement.main,
        "benchmarks.engine": engine.main,
        "benchmarks.burst": burst.main,
        "benchmarks.huggingface": huggingface.main,
    }
    monkeypatch.setitem(engine.PROBE_WIDTH, "cpu", 128)

    def here(command: list[str], log: Path, seconds: float) -> tuple[str | None, list[str]]:
        """The part in this process; the comparison, which other tests run, ends as if time had run
        out.
        """
        assert 0 < seconds <= 9 * 60
        if command[0] not in mains:
            return "no time was left to finish it", []
        monkeypatch.setattr(sys, "argv", [command[0], *command[1:]])
        mains[command[0]]()
        return None, capsys.readouterr().out.splitlines()

    monkeypatch.setattr(gpu, "call", here)
    monkeypatch.setattr(gpu, "startup_s", lambda settings, seconds: 4.25)
    out = tmp_path / "out"
    sizes = [
        "--max-batch-size",
        "16",
        "--rows",
        "1,3",
        "--context",
        "20",
        "--prompts",
        "16",
        "--n",
        "3",
    ]
    monkeypatch.setattr(sys, "argv", ["gpu", *small, "--device", "cpu", *sizes, "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        gpu.main()
    assert caught.value.code == 1
    text = (out / "gpu.md").read_text()
    for said in (
        "in float32 10 of 10 requests have its ids",
        "\n| 3 | ",
        "| 16 | ",
        "The burst of 3 requests, without HTTP: ",
        " of Hugging Face's generate()",
        "ready 4.2 s after",
        "**Missing: comparison** (no time was",
    ):
        assert said in text
    assert json.loads((out / "gpu.json").read_text())["commit"] and (out / "step_time.png").exists()


@pytest.mark.nightly
def test_a_part_that_fails_is_told_from_one_that_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert gpu.call(["benchmarks.engine", "--rows", "x"], tmp_path / "log", 100)[0] == (
        "exit code 2: error: 'x' is no list of positive numbers such as 1,8,64"
    )
    assert "positive numbers" in (tmp_path / "log").read_text()
    assert gpu.call(["benchmarks.engine"], tmp_path / "log", -1.0) == ("no time was left", [])
    (tmp_path / "notes").touch()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="holds no earlier run of this; choose another --out"):
        gpu.main()


@pytest.mark.nightly
def test_a_comparison_that_runs_out_of_time_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "compare",
        "--model",
        "fake",
        "--modes",
        "nobatch",
        "--arrival",
        "poisson:1",
        "--skip-calibration",
    ]
    monkeypatch.setenv("STARTED_BY", str(tmp_path))  # whoever else serves on this machine

    def running() -> list[str]:
        return [
            " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["environ", "cmdline"])
            if (process.info["environ"] or {}).get("STARTED_BY") == str(tmp_path)
        ]

    class OutOfTime(subprocess.Popen):  # type: ignore[type-arg]
        """Its time is over once it has a server, however slow the machine is."""

        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            if timeout == 0.5:
                wait_until(lambda: any("gunicorn" in each for each in running()))
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", OutOfTime)
    problem, said = gpu.call([*command, "--out", str(tmp_path / "out")], tmp_path / "log", 0.5)
    assert problem == "no time was left to finish it"
    assert "interrupted; the servers are stopped" in " ".join(said), "it had to be killed"
    assert running() == []


def test_planning_is_measured_with_and_without_a_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = last_line(scheduler.main, ["--rows", "8", "--waiting", "50"], monkeypatch, capsys)
    assert (
        found["variants"]["dynamic"]["50 waiting"]["rows"] == 8
        and found["variants"]["prefix"]["50 waiting"]["rows"] == 8
        and found["variants"]["nobatch"]["0 waiting"]["rows"] == 1
    )


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (burst.main, ["--model", "demo"], "name another --model"),
        (burst.main, ["--model", "demo", "--n", "65"], "--n must be from 1 to 64"),
        (burst.main, ["--model", "demo", "--modes", "orca"], "unknown mode 'orca'"),
        (burst.main, ["--model", "demo", "--neighbours", "-1"], "--neighbours must be from 0 to"),
        (burst.main, ["--model", "fake"], "leave out --model fake"),
        (engine.main, ["--model", "demo", "--rows", "1,x"], "no list of positive numbers"),
        (engine.main, ["--model", "demo", "--contexts", "2000"], "at most 1024 tokens"),
        (
            engine.main,
            ["--model", "demo", "--rows", "64", "--kv-cache", "0.02GB"],
            "raise --kv-cache",
        ),
        (long_prompt.main, ["--model", "demo", "--max-batch-size", "16"], "raise --max-batch-size"),
        (
            long_prompt.main,
            ["--model", "demo", "--token-budget", "16"],
            "built for --token-budget 16 at most",
        ),
        (
            engine.main,
            ["--model", "demo", "--prompts", "999", "--token-budget", "64"],
            "a --token-budget of its largest",
        ),
        (
            agreement.main,
            ["--model", "demo", "--n", "33", "--max-batch-size", "32"],
            "from 1 to 64 and --max-batch-size",
        ),
        (huggingface.main, ["--model", "demo"], "name another --model"),
        (quantization.main, ["--model", "demo"], "name another --model"),
        (quantization.main, ["--model", "gpt2", "--pool-gb", "0.01"], "holds no request of 1024"),
        (gpu.main, [], "device cuda: no GPU is usable here; use --device cpu"),
    ],
)
def test_bad_settings_end_with_a_sentence(
    main: Callable[[], None],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_pairs_alternate_and_compare_what_both_commands_say(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ours, peer = ("echo 3 requests in 1.0 s, 1,200.5 tok/s", "echo 600 tok/s")
    found = last_line(pairs.main, ["--pairs", "2", ours, peer], monkeypatch, capsys)
    assert found["pairs"] == [[1200.5, 600.0]] * 2 and found["median_ratio"] == pytest.approx(
        2.0008, abs=1e-3
    )
    monkeypatch.setattr(sys, "argv", ["pairs", "echo nothing", peer])
    with pytest.raises(SystemExit):
        pairs.main()
    assert "echo nothing ended with 0 and said no tok/s" in capsys.readouterr().err
