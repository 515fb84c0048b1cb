"""Good settings are resolved once, and reach the scheduler where they have a meaning."""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from config import environment, open_files
from config.config import HANDOFF
from config.flags import refuse_unknown_settings
from config.settings import PARTS, ConfigError, has_effect, varying_parts
from generate import auto, kernels
from scheduling.building import build_scheduler
from scheduling.extensions import ResponseOrder
from scheduling.policies import Mlfq, Priority
from scheduling.policies.windowed import Windowed
from server import launch
from tests.config import parsed, refused
from tests.servers import free_port

EXAMPLE = "1:timeout_ms=500,action=delay,max_size=100,override=yes"


def test_the_pool_is_never_larger_than_its_rows_can_use() -> None:
    assert parsed("dynamic --model demo --max-batch-size 2").n_blocks == 2 * 64
    medium = "dynamic --model gpt2-medium --dtype float32"
    assert parsed(medium).n_blocks == int(4e9 / (16 * 196_608))
    for model in ("fake", "demo"):
        assert parsed(f"dynamic --model {model} --kv-cache 70blocks").n_blocks == 70
    assert parsed("dynamic --kv-cache 2GB").kv_cache == parsed("dynamic --kv-cache 2gb").kv_cache
    shared = {"EB_KV_CACHE": "50%"}  # of an environment that machines with and without a GPU share
    assert parsed("dynamic", shared).kv_cache == "4GB"


def run_on(cpuinfo: str, why_no_kernels: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, *how: f"processor\t: 0\n{cpuinfo}\n")
    monkeypatch.setattr(kernels, "why_unavailable", lambda: why_no_kernels)


@pytest.mark.parametrize(("cpuinfo", "model", "dtype", "linear"), [
    ("flags: avx512f avx512_bf16", "gpt2", "bfloat16", "kernel"),
    ("flags: avx512bw avx512dq avx512vl avx512_bf16 amx_bf16", "gpt2", "bfloat16", "kernel"),
    ("Features\t: fp asimd bf16", "gpt2", "float32", "kernel"),
    ("flags: fpu avx2 fma", "gpt2", "float32", "kernel"),
    ("flags\t\t: fpu avx512f avx512_vnni", "gpt2", "float32", "kernel"),
    ("flags: avx512f avx512_bf16 amx_bf16", "demo", "float32", "kernel"),
    ("model name\t: a bf16 processor", "gpt2", "float32", "kernel"),
])  # fmt: skip
def test_auto_means_bfloat16_where_the_processor_computes_it_natively_but_for_demo(
    cpuinfo: str, model: str, dtype: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(cpuinfo, None, monkeypatch)
    config = parsed(f"dynamic --model {model} --dtype auto")
    assert (config.dtype, config.attention, config.linear) == (dtype, "kernel", linear)
    assert varying_parts(config.model_dump()) is None


def test_auto_keeps_to_float32_beside_pytorchs_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 288, "vocab_size": 300}
    tmp_path.joinpath("config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    monkeypatch.setattr(auto, "native_bfloat16", lambda: True)
    config = parsed(f"dynamic --model {tmp_path} --weights random --tokenizer bytes")
    assert (config.dtype, config.attention, config.linear) == ("float32", "plain", "kernel")


def test_without_kernels_auto_keeps_to_float32_and_parts_that_vary_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on("flags: avx512bw avx512dq avx512vl avx512_bf16 amx_bf16", "no compiler", monkeypatch)
    config = parsed("dynamic --model gpt2")
    assert (config.dtype, config.attention, config.linear) == ("float32", "plain", "plain")
    assert varying_parts(config.model_dump()) is None
    line = "dynamic --model demo --dtype bfloat16"
    assert "the sums of --attention plain and --linear onednn depend" in str(
        list(parsed(f"{line} --linear onednn").warnings())
    )
    run_on("flags: avx2 fma", "no C++ compiler; install g++", monkeypatch)
    assert "neither AVX-512 nor bfloat16 of its own" in refused(f"{line} --linear onednn")
    why = "linear int8 cannot be used here: no C++ compiler; install g++; or leave --linear out"
    assert refused(f"{line} --linear int8") == why


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="it hides what the processor has")
def test_pytorch_agrees_about_this_processor() -> None:
    assert auto.onednn_multiplies_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_kernels_plain_chooses_pytorchs_operations_but_for_a_part_that_is_stated(gpu: None) -> None:
    for device in ("cpu", "cuda"):
        plain = parsed(f"dynamic --device {device} --kernels plain")
        assert {getattr(plain, name) for name in (*PARTS, "norms", "sampler")} == {"plain"}
        assert not plain.captures
        said = ["on what is computed beside it" in each for each in auto.warnings(plain)]
        assert said == [True] * (device == "cuda"), "which computes in bfloat16"
    mixed = parsed("dynamic --device cpu --kernels plain --linear int8")
    assert (mixed.attention, mixed.linear, mixed.norms) == ("plain", "int8", "kernel")


def test_a_gpu_has_a_graph_for_each_decoder_batch_size_unless_settings_forbid(gpu: None) -> None:
    config = parsed("dynamic")
    parts = (config.attention, config.norms, config.sampler, config.linear)
    assert parts == ("triton", "triton", "triton", "triton") and config.captures and config.ahead
    assert parsed("dynamic --linear triton --lora-random 2:8").linear == "triton"
    for what_never_ran in ("--lora-random 2:8", "--dtype float32"):
        assert parsed(f"dynamic {what_never_ran}").linear == "plain"
    for excluded in ("--speculate 2", "--prefill first", "--shed", "--record x", "--no-ahead"):
        assert not parsed(f"dynamic {excluded}").ahead
    assert parsed("static", {"EB_PREFILL": "first"}).ahead, "it has no meaning there"
    assert not parsed("dynamic --device cpu").ahead
    assert config.decoder_batch_sizes == (256, 128, 64, 32, 16, 8, 4, 2, 1)
    small = parsed("dynamic --max-batch-size 48")
    assert small.decoder_batch_sizes == (48, 32, 16, 8, 4, 2, 1)
    none = parsed("dynamic --decoder-batch-sizes none")
    assert none.decoder_batch_sizes == () and not none.captures
    given = parsed("dynamic --device cpu --decoder-batch-sizes 4,1,4")
    assert given.decoder_batch_sizes == (32, 4, 1), "as in RBLN, with the maximum"
    assert parsed("dynamic --device cpu").decoder_batch_sizes == ()
    naive = parsed("dynamic --generator naive")
    assert naive.attention == "plain" and naive.decoder_batch_sizes == ()
    padded = parsed("dynamic --generator padded")
    assert (padded.attention, padded.norms, padded.decoder_batch_sizes) == ("plain", "plain", ())


def test_a_gpu_without_triton_is_warned_of(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the package triton is missing; pip install triton"
    monkeypatch.setattr(kernels, "why_no_triton", lambda head_size: reason)
    config = parsed("dynamic")
    assert config.attention == config.norms == config.linear == "plain"
    assert "pip install triton" in auto.warnings(config)[0]
    for name in PARTS:
        message = refused(f"dynamic --{name} triton")
        assert message.startswith(f"{name} triton cannot be used here: the package triton is")


def test_flags_come_before_the_environment_and_that_before_dotenv(tmp_path: Path) -> None:
    """A dotenv may hold settings of other modes, but no unknown ones."""
    dotenv = tmp_path / ".env"
    dotenv.write_text("EB_PORT=1001\nEB_MAX_WAITING=1\nEB_THREADS=7\nIP=10.0.0.1\nOTHER=x\n")
    environ = {"EB_PORT": "1002", "EB_MAX_WAITING": "2", "HOME": "/"}
    config = parsed("dynamic --port 1003", environ, dotenv)
    assert (config.port, config.max_waiting, config.threads) == (1003, 2, 7)
    dotenv.write_text("EB_MODE=static\nEB_BATCH_SIZE_TARGET=9\n")
    assert parsed("", {}, dotenv).mode == "static"
    message = refused("dynamic", {"EB_BATCHSIZE": "1"})
    assert message.startswith("unknown variable EB_BATCHSIZE")
    assert "are EB_MODE, EB_ORDER" in message
    dotenv.write_bytes(b"EB_PORT=\xff\xfe")
    assert "cannot be read" in refused("dynamic", {}, dotenv)


def test_variables_that_kubernetes_sets_of_a_service_named_eb_are_no_settings() -> None:
    """A server in such a pod did not start: EB_SERVICE_HOST is unknown, EB_PORT no number."""
    names = "PORT_80_TCP", "LLM_PORT", "LLM_PORT_8500_TCP"
    pod = {f"EB_{name}": "tcp://10.0.0.1:80" for name in ("PORT", *names)}
    pod |= {f"EB_{name}_PROTO": "tcp" for name in names if "80" in name}
    pod |= {"EB_PORT_80_TCP_ADDR": "10.0.0.1", "EB_PORT_80_TCP_PORT": "80"}
    pod |= {"EB_SERVICE_HOST": "10.0.0.1", "EB_SERVICE_PORT": "80", "EB_SERVICE_PORT_HTTP": "80"}
    assert parsed("dynamic", pod).port == 8500
    for name, value in (("PORT", "tcp"), ("SERVICE", "x"), ("HTTP_PORT", "80"), ("PORT_80", "80")):
        said = refused("dynamic", {f"EB_{name}": value})
        assert said.startswith(("--port 'tcp'", f"unknown variable EB_{name}"))


@pytest.mark.parametrize(("line", "warning"), [
    ("dynamic --model demo --weights random", "text is noise"),
    ("windowed --model fake --batch-size-target 9 --max-batch-size 5", "5: batches form at that"),
    ("dynamic --model fake --request-timeout-s 9 --drain-timeout-s 8", "raise --drain-timeout"),
    ("dynamic --model fake --shed --slo-classes a=tpot:9", "here only requests state them"),
])  # fmt: skip
def test_a_warning_names_what_a_user_should_know(line: str, warning: str) -> None:
    assert warning in auto.warnings(parsed(line))[0]


def test_auto_means_demo_on_a_cpu_and_gpt2_medium_on_a_gpu(gpu: None) -> None:
    def shown(line: str) -> list[Any]:
        config = parsed(line)
        names = "model device dtype tokenizer max_batch_size token_budget kv_cache"
        return [getattr(config, name) for name in names.split()] + [config.n_blocks]

    cpu = ["demo", "cpu", "float32", "bytes", 32, 256, "4GB", 32 * 64]
    assert shown("dynamic --device cpu --model auto --threads auto") == cpu
    gpu_s = ["gpt2-medium", "cuda", "bfloat16", "r50k_base", 256, 2048, "90%", 256 * 64]
    assert shown("dynamic --device auto") == gpu_s
    assert parsed("dynamic --kv-cache 1GB").n_blocks == int(1e9 / (16 * 98_304))


def test_gunicorns_own_variables_are_cleared_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`GUNICORN_CMD_ARGS="--workers 2"` made two engines with half of the requests each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HANDOFF, "")
    gunicorns = {"GUNICORN_CMD_ARGS": "--workers 2", "GUNICORN_FD": "3"}
    gunicorns |= {"WEB_CONCURRENCY": "auto", "FORWARDED_ALLOW_IPS": "*"}
    for name, value in gunicorns.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(dict(os.environ)))
    launch.main(["dynamic", "--model", "fake", "--port", str(free_port())])
    [environment] = started
    assert HANDOFF in environment and not gunicorns.keys() & environment.keys()
    errors = capsys.readouterr().err
    assert all(f"warning: {name} is gunicorn's own" in errors for name in gunicorns)


def test_without_a_folder_for_temporary_files_a_server_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gunicorn ended with a traceback, as in a container whose folders are read-only."""
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it is served"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError) as failed:
        launch.main(["dynamic", "--model", "fake", "--port", str(free_port())])
    said = environment.sentence(failed.value)
    assert said and said.endswith("none']; set TMPDIR to a folder that can be written")


def test_a_system_may_allow_fewer_open_files_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS names no limit, and refuses more than 10,240: Python raises ValueError."""
    limits = [256, resource.RLIM_INFINITY]

    def allow(kind: int, asked: tuple[int, int]) -> None:
        if asked[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = asked

    monkeypatch.setattr(resource, "setrlimit", allow)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    assert [open_files.allow_open_files(n) for n in (100, 300, 20_000)] == [256, 300, 10_240]
    assert open_files.allow_open_files(20_000) == limits[0] == 10_240
    limits[:] = 256, 4_000
    assert open_files.allow_open_files(20_000) == limits[0] == 4_000


def test_what_cannot_be_served_ends_the_launcher_with_2_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it is served"))
    monkeypatch.setattr(os, "chdir", lambda _: None)
    monkeypatch.setenv(HANDOFF, "")
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    os.mkfifo(pipe := tmp_path / "pipe")  # without a reader
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, sentence in (
            ("--nope", "unknown flag --nope"),
            (f"--model {tmp_path} --tokenizer bytes", "damaged or no safetensors file"),
            (f"--model fake --port {port}", "Address already in use); choose another --port"),
            (f"--model fake --request-log {tmp_path}/none/log", "choose another --request-log"),
            (f"--model fake --request-log {pipe}", "choose another --request-log"),
            (f"--model fake --record {tmp_path}", "choose another --record"),
        ):
            with pytest.raises(SystemExit, match="2"):
                launch.main(["dynamic", *flags.split()])
            error = capsys.readouterr().err
            assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_files_are_those_of_the_folder_in_which_the_command_was_given() -> None:
    config = parsed("dynamic --request-log log --record calls")
    assert [config.request_log, config.record] == [*map(os.path.abspath, ("log", "calls"))]


def test_a_setting_has_an_effect_beside_those_that_it_needs() -> None:
    """A report shows those alone: not the levels of a queue that has none."""
    plain = {"mode": "dynamic", "order": "fcfs", "kv_reservation": "whole", "model": "demo"}
    unused = "mlfq_quantum aging user_weights victim bins max_wait_s fake_slowdown"
    for name in unused.split():
        assert not has_effect(name, plain), name
    assert has_effect("aging", plain | {"order": "sjf"}) and has_effect("max_batch_size", plain)
    assert has_effect("victim", plain | {"kv_reservation": "demand"})
    assert has_effect("max_wait_s", plain | {"lora_policy": "skip"})
    assert has_effect("bins", {"mode": "multibin"})
    assert has_effect("victim", {"mode": "dynamic"}), "of a run before there was a choice"


def test_settings_that_fit_are_taken_without_a_warning() -> None:
    for line in (
        "windowed",
        f"static --order priority --queue-policy {EXAMPLE};3:timeout_ms=0 --max-wait-s 5",
        "dynamic --order priority --priority-levels 2 --default-priority-level 2",
        "dynamic --order srpt --length-predictor constant",
        "dynamic --order sjf --preserve-ordering",
        "dynamic --order priority --priority-levels 1 --queue-policy 1:timeout_ms=5,max_size=9 "
        "--preserve-ordering",
        "multibin --bins 2 --length-predictor noisy:0.5 --order fcfs",
        "dynamic --shed --slo-classes a=ttft:9 --length-predictor noisy:0.5",
        "dynamic --lora-random 2:8 --lora-policy drain --length-predictor prompt",
        "windowed --preferred-batch-sizes 32,1",
        "dynamic --budget-counts all --token-budget 9 --max-batch-size 9",
        # there the target of 4, which 3 rows never reach, has no meaning
        "windowed --preferred-batch-sizes 2 --max-batch-size 3",
        "nobatch --user-requests-per-minute 1 --user-tokens-per-minute 9 --preserve-ordering",
        "dynamic --order fair --user-weights a=1e-3,b=2,c=d=1",
    ):
        assert auto.warnings(parsed(f"{line} --model fake")) == []


def test_a_queue_policy_changes_what_it_states_and_leaves_the_rest_as_it_is() -> None:
    text = " 1 : timeout_ms=2.5 , override=yes ;;2:max_size=7,;3:"
    order = Priority(queue_policy=text)
    one, two, three = (order.queue_policies[level] for level in (1, 2, 3))
    assert (one.timeout_ms, one.action, one.max_size, one.override) == (2.5, "reject", 0, True)
    assert (two.timeout_ms, two.action, two.max_size, two.override) == (0, "reject", 7, False)
    assert (three.timeout_ms, three.max_size) == (0, 0)
    order = Priority(queue_policy="2:max_size=7; default :timeout_ms=5")
    states = {n: (own.timeout_ms, own.max_size) for n, own in order.queue_policies.items()}
    assert states == {1: (5, 0), 2: (0, 7), 3: (5, 0)}, "where a level has none of its own"


def test_settings_reach_the_scheduler() -> None:
    line = f"windowed --order priority --queue-policy {EXAMPLE} --max-wait-s 5 --model fake"
    line += " --priority-levels 2 --default-priority-level 2 --preferred-batch-sizes 2,4"
    scheduler = build_scheduler(parsed(line))
    assert scheduler.order == Priority(5.0, 2, 2, EXAMPLE)
    assert isinstance(scheduler.policy, Windowed)
    assert scheduler.policy.preferred_batch_sizes == (2, 4)
    assert ResponseOrder not in map(type, scheduler.extensions)
    in_order = parsed("static --preserve-ordering --model fake")
    assert ResponseOrder in map(type, build_scheduler(in_order).extensions)


def test_settings_of_other_modes_and_orders_in_the_environment_are_no_error() -> None:
    """A .env that modes share was refused for sizes and levels that this mode does not use."""
    shared = "PREFERRED_BATCH_SIZES=64 QUEUE_POLICY=5:max_size=1 DEFAULT_PRIORITY_LEVEL=5 BINS=8"
    shared += " AGING=1 PREFILL_WEIGHT=1 LENGTH_PREDICTOR=constant MAX_WAIT_S=5 USER_WEIGHTS=a=2"
    environ = dict(f"EB_{word}".split("=", 1) for word in shared.split())
    for line in ("dynamic", "static", "nobatch", "dynamic --order fair", "dynamic --order mlfq"):
        config = parsed(f"{line} --model fake", environ)
        assert config.bins == 8 and config.max_wait_s == 5
    of_dynamic = {"EB_BUDGET_COUNTS": "all", "EB_TOKEN_BUDGET": "8", "EB_PREFILL": "every:2"}
    assert parsed("static --model fake --ahead", of_dynamic).token_budget == 8
    assert Mlfq(max_wait_s=5.0).promote_after_s == 5
    for line, message in (
        ("windowed", "64 is no batch size"),
        ("dynamic --order priority", "default-priority-level 5 is beyond the 3"),
        ("multibin", "gives all the same"),
    ):
        assert message in refused(line, environ)
    assert "no weight" in refused("dynamic", {"EB_USER_WEIGHTS": "a"}), "it cannot be read"


def test_runs_and_costs_in_results_have_settings_of_today() -> None:
    """But those of the laboratory's own policies, which are not loaded here."""
    results = Path(__file__).resolve().parents[2] / "results"
    files = [*results.rglob("summary.json"), *(results / "costs").glob("*.json")]
    for file in (each for each in files if "arena" not in each.parts):
        refuse_unknown_settings(str(file), json.loads(file.read_text()).get("config", ()))
    with pytest.raises(ConfigError, match=r"x has the setting kv_cach, .* \(did you mean kv_cache"):
        refuse_unknown_settings("x", ["kv_cach"])
