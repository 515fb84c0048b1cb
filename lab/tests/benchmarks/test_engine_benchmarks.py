"""The benchmarks of the engine at a small size: what they serve, and what their last lines hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generate import assembly, kernels
from generate.attention import KernelAttend
from generate.auto import build
from lab.benchmarks import agreement, bits, engine, harness, offline
from lab.benchmarks.workload import draw
from lab.tests.benchmarks.conftest import result_of
from scheduling.inference import Row
from tests.programs import output, ran


def test_the_burst_is_the_peers_burst() -> None:
    requests = draw()
    assert sum(tokens for _, tokens in requests) == 6904 and draw(16) == requests[:16]
    digest = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
    assert digest == "c35044afddcfb7aac5fa6016f150313ea3977fc65f35bfc168fd1b90038b8535"


def test_the_burst_reports_what_it_served(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop interval was recorded, and the engine's loop never heard of it."""
    monkeypatch.setenv("EB_PORT", "9")  # the environment may be shared
    result = result_of("burst", small, "--n 6 --loop-interval-ms 5")
    folder = Path(small.split()[1])
    assert result["config"]["model"] == folder.name and str(folder) not in result["command"]
    assert result["config"]["max_batch_size"] == 6 and result["config"]["loop_interval_ms"] == 5
    assert not harness.NO_HTTP & {*result["config"]}
    tokens = result["completion_tokens"]
    assert tokens == sum(tokens for _, tokens in draw(6))
    assert result["output_throughput"] == pytest.approx(tokens / result["wall_clock_s"])
    assert result["wall_clock_s"] >= 0.005 * (result["iterations"] - 1) > 0


def test_a_step_and_its_bound(
    small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(engine.PROBE_WIDTH, "cpu", 128)
    sizes = "--rows 1,3 --contexts 20,70 --sampling greedy,top --repeats 2 --max-batch-size 9"
    output("lab.benchmarks.engine", f"{sizes} {small} --out {tmp_path}")
    assert "profiler" not in capfd.readouterr().err, "PyTorch's wrote two lines for each step"
    result = json.loads((tmp_path / "engine.json").read_text())
    steps = result["steps"]
    places = [(step["context"], step["sampling"], step["rows"]) for step in steps]
    assert places == [*product((20, 70), ("greedy", "top"), (1, 3))]
    assert 0 < steps[0]["bytes"] < steps[5]["bytes"]
    assert all(step["memory_s"] > 0 and step["arithmetic_s"] > 0 for step in steps)
    assert all(0 < s["reached_least"] <= s["reached"] <= s["reached_most"] for s in steps)
    assert (tmp_path / "step_time.png").stat().st_size > 10_000
    in_sequence = {"steps": [steps[0] | {"of_sequence_s": 8e-5}]}  # as on a GPU
    assert engine.table(in_sequence).endswith(" | 0.08 |")
    page = (tmp_path / "engine.md").read_text()
    assert "| rows | context | sampling | step, ms | bound, ms | reached, % | tok/s |" in page
    assert f"| 3 | 70 | top | {1e3 * steps[7]['seconds']:.2f} |" in page


def test_a_step_is_held_against_the_faster_probe_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads, then reads twice as fast, then multiplies slowly; steps of 10 s."""
    bounds = iter([(4.0, 1.0), (2.0, 1.0), (4.0, 6.0), (4.0, 3.0)])
    machine: Any = SimpleNamespace(bound=lambda n_bytes, flops: next(bounds))

    def steps(engine: Any, rows: Any, repeats: int, between: Callable[[], Any]) -> Any:
        return ((10.0, between()) for _ in range(repeats))

    monkeypatch.setattr(engine, "timed_steps", steps)
    config = build("dynamic", {"model": "demo"}, {})
    nothing: Any = SimpleNamespace()
    found = engine.against_bound(nothing, machine, config, 1, 20, "greedy", repeats=3)
    assert [found[name] for name in ("reached_least", "reached", "reached_most")] == [0.2, 0.2, 0.4]
    assert found["memory_s"] == 2.0 and found["arithmetic_s"] == 1.0 and found["seconds"] == 10.0


def test_the_reader_reads_all_of_an_array() -> None:
    words = torch.randint(-(2**62), 2**62, (100_003,), generator=torch.Generator().manual_seed(0))
    for n in (0, 1, 63, 64, 32_768, 100_003):
        assert kernels.load().read_int64(words.data_ptr(), n, 2) == int(words[:n].sum())


@pytest.mark.parametrize("linear", ["kernel", "int8"])
def test_other_bits_of_kernels_are_found(linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "demo", "dtype": "bfloat16", "linear": linear}
    config = build("dynamic", given, {})
    names = {"h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "lm_head"}
    names |= {"attention", "attention of prompts", "attention of completions"}
    monkeypatch.setattr(bits, "COUNTS", (1, 6, 7, 64))
    assert bits.other_bits(config) == {name: [] for name in names}
    right = KernelAttend.__init__

    def by_length(self: KernelAttend, attention: Any, rows: list[Row], tokens: Any) -> None:
        """As if a token that is computed alone were of a completion."""
        right(self, attention, rows, tokens)
        in_prompt = self._arrays[-1]
        in_prompt[0] *= len(in_prompt) > 1

    monkeypatch.setattr(KernelAttend, "__init__", by_length)
    found = {name: counts for name, counts in bits.other_bits(config).items() if counts}
    assert found == {"attention of prompts": [1]}


def test_engine_against_oracle(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--decoder-batch-sizes 32,3 --prefix-caching"  # the long ones begin alike
    words = f"{small} --n 4 --tokens 5 {sizes}"
    result = result_of("agreement", words)
    verdict = {"requests": 24, "equal": 24, "undecided": 0, "different": 0}
    assert result["agrees"] and result["float32"] == verdict
    assert 0 < result["bfloat16"]["largest_difference"] < result["bfloat16"]["tolerance"]

    assert set(result["other_bits"]) == {"kernel float32", "kernel bfloat16", "int8 bfloat16"}
    assert not any(any(found.values()) for found in result["other_bits"].values())

    def with_other_weights(config: Any) -> Any:
        monkeypatch.setattr(assembly, "SEED", int(config.generator != "naive"))
        return offline.load(config)

    monkeypatch.setattr(agreement, "load", with_other_weights)
    assert ran("lab.benchmarks.agreement", *words.split()).returncode == 1
