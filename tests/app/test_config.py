"""Bad settings end in one sentence that names the valid ones; good ones are resolved once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
import launch
from config import (
    HANDOFF,
    Config,
    ConfigError,
    build,
    flag,
    from_environment,
    has_effect,
    parse,
    resolve,
)
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: False)


def refused(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ or {}, dotenv=None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["contnuous"],
            "unknown mode 'contnuous'; valid modes are nobatch, static, windowed, dynamic",
        ),
        (["dynmic"], r"unknown mode 'dynmic' \(did you mean dynamic\?\)"),
        ([], "no mode given; valid modes are nobatch, static"),
        (
            ["dynamic", "--prot", "1"],
            r"unknown flag --prot \(did you mean --port\?\); valid flags are --help, --order",
        ),
        (
            ["static", "--batch-size-target", "4"],
            "--batch-size-target has no meaning in mode static; it belongs to windowed",
        ),
        (
            ["dynamic", "--compact-batches"],
            "no meaning in mode dynamic; it belongs to static and windowed",
        ),
        (
            ["dynamic", "--max-batch-size", "0"],
            "--max-batch-size '0': input should be greater than or equal to 1",
        ),
        (
            ["dynamic", "--max-batch-size", "many"],
            "--max-batch-size 'many': input should be a valid integer",
        ),
        (
            ["windowed", "--max-batch-delay-ms", "0"],
            "--max-batch-delay-ms '0': input should be greater than 0",
        ),
        (
            ["windowed", "--batch-size-limit", "0"],
            "--batch-size-limit '0': input should be greater than or equal to 1",
        ),
        (
            ["dynamic", "--kv-cache-gb", "nan"],
            "--kv-cache-gb 'nan': input should be a finite number",
        ),
        (["dynamic", "--dtype", "int8"], "--dtype 'int8': input should be 'float32' or 'bfloat16'"),
        (["dynamic", "--device", "cuda"], "no GPU is usable here; use --device cpu"),
        (["dynamic", "--model", "gpt5"], "'gpt5' is neither a folder nor one of demo, fake, gpt2"),
        (
            ["dynamic", "--max-model-len", "2048"],
            "max_model_len 2048 is beyond the 1024 positions of demo",
        ),
        (
            ["dynamic", "--tokenizer", "r50k_base"],
            "tokenizer r50k_base has 50257 ids and demo only 257",
        ),
        (
            ["dynamic", "--decoder-batch-sizes", "64,8"],
            "'64,8': 64 is beyond max_batch_size 32; leave it out, or raise --max-",
        ),
        (
            ["dynamic", "--decoder-batch-sizes", "8,0"],
            "--decoder-batch-sizes '8,0': 0 is no batch size",
        ),
        (
            ["dynamic", "--decoder-batch-sizes", "8;4"],
            "must be numbers separated by commas, such as 32,8,4,1, or none",
        ),
        (
            ["dynamic", "--decoder-batch-sizes", "8", "--generator", "naive"],
            "decoder_batch_sizes are the cached engine's",
        ),
        (["dynamic", "--enforce-eager"], "--enforce-eager has no meaning on a CPU; leave it out"),
        (
            ["dynamic", "--gpu-memory-utilization", "0.5"],
            "--gpu-memory-utilization has no meaning on a CPU",
        ),
        (
            ["dynamic", "--attention", "triton"],
            "attention triton runs on a GPU alone; leave --attention out",
        ),
        (["dynamic", "--port"], "--port: expected one argument"),
        (["dynamic", "--port", "auto"], "--port 'auto': input should be a valid integer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_command_line_is_answered_in_one_sentence(argv: list[str], said: str) -> None:
    message = refused(*argv)
    assert re.search(said, message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("instructions", "model", "dtype", "linear"),
    [
        ("avx512f avx512_bf16", "gpt2", "bfloat16", "kernel"),
        ("avx512bw avx512dq avx512vl avx512_bf16 amx_bf16", "gpt2", "bfloat16", "onednn"),
        ("asimd bf16", "gpt2", "bfloat16", "onednn"),
        ("avx512f avx512_vnni", "gpt2", "float32", "kernel"),
        ("avx512f avx512_bf16 amx_bf16", "demo", "float32", "kernel"),
    ],
)
def test_auto_means_bfloat16_where_the_processor_computes_it_natively_but_for_demo(
    instructions: str, model: str, dtype: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_instructions", lambda: {*instructions.split()})
    monkeypatch.setattr(kernels, "why_unavailable", lambda: None)
    config = parse(["dynamic", "--model", model, "--dtype", "auto"], {}, dotenv=None)
    assert (config.dtype, config.attention, config.linear) == (dtype, "kernel", linear)


@pytest.mark.parametrize(
    ("instructions", "linear"),
    [("avx2 fma", "plain"), ("avx512f avx512bw avx512dq avx512vl", "onednn")],
)
def test_bfloat16_is_left_to_onednn_only_where_it_has_it(
    instructions: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_instructions", lambda: {*instructions.split()})
    monkeypatch.setattr(kernels, "why_unavailable", lambda: "no C++ compiler")
    argv = ["dynamic", "--model", "demo", "--dtype", "bfloat16"]
    assert parse(argv, {}, dotenv=None).linear == linear
    argv += ["--linear", "onednn"]
    if linear == "onednn":
        assert parse(argv, {}, dotenv=None).linear == linear
    else:
        assert "neither AVX-512 nor bfloat16 of its own; leave --linear out" in refused(*argv)


def test_pytorch_says_the_same_of_this_processor() -> None:
    assert resolve.onednn_multiplies_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_what_a_processor_computes_natively_is_read_from_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: real(file if str(path) == "/proc/cpuinfo" else path)
    )
    for line, native in (
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx512_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("model name\t: a bf16 processor", False),
    ):
        file.write_text(f"processor\t: 0\n{line}\n")
        assert resolve.native_bfloat16() is native


@pytest.mark.parametrize("native", ["yes", "no"])
@pytest.mark.nightly
def test_the_tests_and_their_servers_can_run_as_on_another_processor(native: str) -> None:
    environment = os.environ | {
        "NATIVE_BFLOAT16": native,
        "PYTHONPATH": str(ROOT / "tests" / "processor"),
    }
    program = (
        "import config; print(config.build('dynamic', {'model': 'gpt2-medium', 'device': "
        "'cpu'}, {}).dtype)"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, text=True
    )
    assert said == {"yes": "bfloat16\n", "no": "float32\n"}[native]


@pytest.mark.parametrize("setting", ["attention", "linear", "sampler", "norms"])
def test_the_cpus_kernels_are_refused_on_a_gpu(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    assert refused("dynamic", f"--{setting}", "kernel") == (
        f"{setting} kernel runs on a CPU alone; leave --{setting} out, or use --device cpu"
    )
    config = parse(["dynamic"], {}, dotenv=None)
    assert (config.device, config.dtype, config.linear) == ("cuda", "bfloat16", "plain")


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "no triton"])
def test_a_gpu_has_a_graph_for_each_decoder_batch_size_unless_told_otherwise(
    triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    reason = None if triton else "the package triton is missing; pip install triton"
    monkeypatch.setattr(kernels, "why_no_triton", lambda head_size: reason)
    config = parse(["dynamic"], {}, dotenv=None)
    if triton:
        assert (config.attention, config.norms, config.sampler) == ("triton", "triton", "plain")
        assert config.captures
        assert config.decoder_batch_sizes == (256, 128, 64, 32, 16, 8, 4, 2, 1)
        assert parse(
            ["dynamic", "--max-batch-size", "48"], {}, dotenv=None
        ).decoder_batch_sizes == (48, 32, 16, 8, 4, 2, 1)
        eager = parse(["dynamic", "--enforce-eager"], {}, dotenv=None)
        assert eager.decoder_batch_sizes == config.decoder_batch_sizes and not eager.captures
        none = parse(["dynamic", "--decoder-batch-sizes", "none"], {}, dotenv=None)
        assert none.decoder_batch_sizes == () and not none.captures
        assert "has no meaning without attention triton" in refused(
            "dynamic", "--enforce-eager", "--attention", "plain"
        )
        assert "leave one of them out" in refused(
            "dynamic", "--kv-cache-gb", "1", "--gpu-memory-utilization", "0.5"
        )
        assert not parse(["dynamic", "--attention", "plain"], {}, dotenv=None).captures
    else:
        assert config.attention == config.norms == "plain"
        assert "pip install triton" in config.warnings()[0]
        for name in ("attention", "norms"):
            assert refused("dynamic", f"--{name}", "triton").startswith(
                f"{name} triton cannot be used here: the package triton is"
            )


def test_decoder_batch_sizes_are_sorted_and_hold_max_batch_size() -> None:
    def sizes(text: str, *more: str) -> tuple[int, ...]:
        return parse(
            ["dynamic", "--decoder-batch-sizes", text, *more], {}, dotenv=None
        ).decoder_batch_sizes

    assert sizes("1,8,4", "--max-batch-size", "8") == (8, 4, 1)
    assert sizes("4,1,4") == (32, 4, 1), "RBLN adds the maximum when it is missing"
    assert sizes("none") == () == build("dynamic", {}, {}).decoder_batch_sizes
    assert build("static", {}, {"decoder_batch_sizes": "2"}).decoder_batch_sizes == (32, 2)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    message = refused(
        "dynamic", "--model", "gpt2-medium", "--dtype", "float32", "--kv-cache-gb", "0.1"
    )
    # 2 (keys, values) × 24 layers × 1024 × 4 bytes = 196,608 bytes a token; 16 tokens a block; 0.1
    # GB = 31 blocks
    assert (
        "0.1 holds 31 blocks of 16 tokens × 196,608 bytes" in message
        and "needs 64 (0.201 GB)" in message
    )
    assert "GB of weights" in refused(
        "dynamic", "--model", "gpt2-xl", "--kv-cache-gb", "1e6", "--max-batch-size", "9999999"
    )


def test_the_pool_is_never_larger_than_its_rows_can_use() -> None:
    config = build("dynamic", {"model": "demo", "max_batch_size": 2}, {})
    assert config.n_blocks == 2 * 64
    assert build("dynamic", {"model": "gpt2-medium", "dtype": "float32"}, {}).n_blocks == int(
        4e9 / (16 * 196_608)
    )


def test_flags_come_before_the_environment_and_that_before_dotenv(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("EB_PORT=1001\nEB_MAX_WAITING=1\nEB_THREADS=7\nIP=10.0.0.1\nOTHER=x\n")
    environ = {"EB_PORT": "1002", "EB_MAX_WAITING": "2", "HOME": "/"}
    config = parse(["dynamic", "--port", "1003"], environ, dotenv)
    assert (config.port, config.max_waiting, config.threads) == (1003, 2, 7)


def test_a_shared_dotenv_may_hold_settings_of_other_modes_but_no_unknown_ones(
    tmp_path: Path,
) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("EB_MODE=static\nEB_BATCH_SIZE_TARGET=9\n")
    assert parse([], {}, dotenv).mode == "static"
    with pytest.raises(
        ConfigError, match=r"unknown variable EB_BATCHSIZE .*valid ones are EB_MODE, EB_ORDER"
    ):
        from_environment({"EB_BATCHSIZE": "1"}, dotenv)


def test_a_dotenv_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"EB_PORT=\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["dynamic"], {}, tmp_path / ".env")


def test_the_smallest_of_target_limit_and_rows_flushes_a_window_and_a_warning_says_so() -> None:
    assert build("windowed", {"model": "fake"}, {}).warnings() == []
    assert (
        "text is noise"
        in build("dynamic", {"model": "demo", "weights": "random"}, {}).warnings()[0]
    )
    assert build("dynamic", {"model": "demo"}, {}).warnings() == []
    config = build("windowed", {"model": "fake", "batch_size_target": 9, "batch_size_limit": 3}, {})
    assert "batches form at 3" in config.warnings()[0]
    config = build("windowed", {"model": "fake", "batch_size_target": 9, "max_batch_size": 5}, {})
    assert "batches form at 5" in config.warnings()[0]


def test_auto_means_demo_on_a_cpu_and_gpt2_medium_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = build("dynamic", {"model": "auto", "device": "auto", "threads": "auto"}, {})
    assert (cpu.model, cpu.device, cpu.dtype, cpu.max_batch_size, cpu.token_budget) == (
        "demo",
        "cpu",
        "float32",
        32,
        256,
    )
    monkeypatch.setattr(resolve, "gpu_is_usable", lambda: True)
    gpu = build("dynamic", {}, {})
    assert (gpu.model, gpu.device, gpu.dtype, gpu.max_batch_size) == (
        "gpt2-medium",
        "cuda",
        "bfloat16",
        256,
    )
    assert gpu.tokenizer == "r50k_base" and gpu.token_budget == 2048
    assert (
        gpu.kv_cache_gb is None and gpu.gpu_memory_utilization == 0.9 and gpu.n_blocks == 256 * 64
    )
    assert build("dynamic", {"kv_cache_gb": "1"}, {}).n_blocks == int(1e9 / (16 * 98_304))


def test_a_config_survives_the_way_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "model": "demo",
        "batch_size_limit": "8",
        "request_timeout_s": "2.5",
        "decoder_batch_sizes": "8,1",
    }
    config = build("windowed", settings, {})
    monkeypatch.setattr(
        resolve,
        "gpu_is_usable",
        lambda: pytest.fail("the worker must take the settings as they are"),
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_http_threads_cover_every_request_in_flight() -> None:
    assert build("dynamic", {"max_batch_size": 2, "max_waiting": 3}, {}).max_in_flight == 5
    config = build("dynamic", {"max_batch_size": 256, "max_waiting": 1044}, {})
    assert config.http_threads > 1300


def test_help_lists_every_setting_with_its_default() -> None:
    shown = subprocess.run(
        [sys.executable, "launch.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in Config.model_fields:
        if name != "mode":
            assert flag(name) in shown
    assert shown.count("(default:") == len(Config.model_fields) - 1


def test_what_gunicorn_reads_from_the_environment_is_cleared_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`GUNICORN_CMD_ARGS="--workers 2"` goes before a configuration file: it made two engines, of
    which each had half of the requests.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HANDOFF, "")
    gunicorns = {
        "GUNICORN_CMD_ARGS": "--workers 2",
        "GUNICORN_FD": "3",
        "WEB_CONCURRENCY": "auto",
        "FORWARDED_ALLOW_IPS": "*",
    }
    for name, value in gunicorns.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(dict(os.environ)))
    launch.main(["dynamic", "--model", "fake", "--port", str(free_port())])
    [environment] = started
    assert HANDOFF in environment and not gunicorns.keys() & environment.keys()
    said = capsys.readouterr().err
    assert all(f"warning: {name} is gunicorn's own" in said for name in gunicorns)


def test_the_launcher_exits_with_2_and_no_traceback() -> None:
    for argv in (["contnuous"], ["static", "--batch-size-target", "4"], ["dynamic", "--nope"]):
        ended = subprocess.run(
            [sys.executable, "launch.py", *argv], cwd=ROOT, capture_output=True, text=True
        )
        assert ended.returncode == 2
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1


def test_a_setting_has_an_effect_beside_those_that_it_needs() -> None:
    """A report tells those alone: not the levels of a queue that nobody uses."""
    plain = {"mode": "dynamic", "order": "fcfs", "kv_reservation": "whole"}
    for name in ("mlfq_quantum", "aging", "user_weights", "victim", "bins", "max_wait_s"):
        assert not has_effect(name, plain), name
    assert has_effect("aging", plain | {"order": "sjf"}) and has_effect("max_batch_size", plain)
    assert has_effect("victim", plain | {"kv_reservation": "demand"})
    assert has_effect("bins", {"mode": "multibin"})
    assert has_effect("victim", {"mode": "dynamic"}), "of a run before there was a choice"
