"""Costs of vLLM with a model and on a GPU that are not here: from kernels that NVIDIA measured one
by one, in aiconfigurator-core (Apache-2.0), which `./setup.sh` does not install.

    pip install --no-deps aiconfigurator-core==0.12.0 pyyaml packaging      # Linux, x86-64
    python -m simulate.kernels h100-llama-3.1-8b …                          # files of results/costs

An iteration takes the products of all its tokens, and the attention of its rows and of its chunks
of prompts, each by an interpolation between measured kernels. All of it is multiplied by `SLOWER`.
What the host does between two iterations is not in it: vLLM from 0.14 on does it beside the GPU.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from client.machine import ROOT, commit, save_json
from client.quoting import printable
from client.saving import write
from simulate.least_squares import relative
from simulate.loop import PS
from simulate.served_model import BLOCK_SIZE, GIB, KERNELS, ServedModel

FOLDER = ROOT / "results" / "costs"
PACKAGE = "aiconfigurator-core"
# time of a real iteration ÷ that of its kernels: 19 seconds of decode rows alone of Llama-3.1-8B in
# vLLM 0.19 on an RTX PRO 6000, by `python -m lab.studies real`; p5 is 1.04 and p95 1.25
SLOWER = 1.102
# mean latency ÷ what is foreseen − 1, in percent: p5, p50 and p95 of that study's runs over HTTP
RUNS_PERCENT = (-11.5, -0.6, 11.1)
# HTTP and tokenizing in `vllm serve`, before the engine has a request: assumed (docs/models.md)
REQUEST_S = 5e-3
LONG = 100_000  # tokens of a request, beside which a window of attention is short
TOKENS = sorted({m << k for k in range(12) for m in (4, 5, 6, 7)} | {1, 2, 3, 16384})
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
CONTEXTS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
CHUNKS = [16, 64, 256, 512, 1024, 2048, 4096, 8192]
MS = 1e-3
VLLM = {"a100": "0.14.0"}  # whose kernels were measured, where it is not 0.24.0
OVER_PCIE = ("l40s", "rtx-pro-6000")  # GPUs without NVLink


class Gpu(NamedTuple):
    """A GPU: NVIDIA's name of its measurements, and the bytes that CUDA reports of its memory."""

    system: str
    memory: float


GPUS = {
    "a100": Gpu("a100_sxm", 79.1 * GIB),
    "b200": Gpu("b200_sxm", 178.3 * GIB),
    "h100": Gpu("h100_sxm", 79.1 * GIB),
    "h200": Gpu("h200_sxm", 139.8 * GIB),
    "l40s": Gpu("l40s", 44.4 * GIB),
    "rtx-pro-6000": Gpu("rtx_pro_6000_server", 95.0 * GIB),
}
MODELS = {
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-70b-fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}


def of_kernels(name: str, gpu: str, model: str, tp: int) -> dict[str, Any]:
    """Return the costs, as a file has them, of a model on so many GPUs. Raises ValueError."""
    try:
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.models import get_model
    except ImportError:
        raise ValueError(
            f"{name} needs NVIDIA's measurements; pip install --no-deps {PACKAGE}==0.12.0 pyyaml "
            "packaging (Linux on x86-64), or name a file of results/costs"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    system, memory = GPUS[gpu]
    shape = {"tp_size": tp, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": tp}
    shape["moe_ep_size"] = 1
    try:
        with _listed(model) as listed:
            handle = EngineHandle.compile(listed, system, "vllm", **shape)
            built = get_model(listed, build_model_config(**shape), "vllm")
    except Exception as error:  # of many kinds, and none is stated
        raise ValueError(f"{name}: {PACKAGE} has no such kernels ({str(error)[:200]})") from None
    inner = built._inter_size * getattr(built, "_topk", 1)
    served = ServedModel(
        gpu=gpu,
        gpus=tp,
        max_model_len=built._context_length,
        memory=round(memory),
        weights=round(sum(each.get_weights() for each in built.context_ops)),
        kv_per_token=round(built.get_kvcache_bytes_per_sequence(LONG) / LONG),
        activations_per_token=2 * (4 * built._hidden_size + 3 * inner // tp),
    )
    room = served.blocks(served.settings()) * BLOCK_SIZE
    if room <= 0:
        raise ValueError(f"{name}: the weights do not fit into {tp} × {gpu}; take more GPUs")

    def parts(prompt: int, rows: int, whole: int, start: int = 0) -> tuple[float, ...]:
        """Return milliseconds: of all, of products, and of prompts' and of rows' attention."""
        return tuple(handle.mixed_step_breakdown(prompt, rows, whole, 2, start))

    def chunk(n: int, start: int) -> float:
        """Return milliseconds of a chunk's attention; the package gives the mean of all chunks."""
        return parts(n, 0, start + n, start)[2] * math.ceil((start + n) / n)

    products = {n: parts(n, 0, n)[1] for n in TOKENS}
    decode = {}
    for rows in ROWS:
        contexts = [each for each in CONTEXTS if rows * each <= room or each <= 512]
        attention = np.array([parts(1, rows, each - 2)[3] for each in contexts])
        known = np.full(len(contexts), parts(rows, 0, rows)[1])
        terms = np.column_stack([np.ones(len(contexts)), rows * np.array(contexts)])
        iteration, context = relative(terms, attention + known, known)
        decode[str(rows)] = {"iteration": _ps(iteration), "context": _ps(context)}
    cases = [
        (n, start)
        for n in CHUNKS
        for start in (0, *CONTEXTS[2:])
        if n + start <= served.max_model_len
    ]
    # a chunk's row is counted among the rows: one kernel attends for both
    alone = decode["1"]["iteration"] / (SLOWER * MS * PS)
    known = np.array([parts(n, 0, n)[1] + alone for n, _ in cases])
    whole = np.array([parts(n, 0, n)[1] + chunk(n, start) for n, start in cases])
    terms = np.array([(1, n, n * start + n * (n + 1) // 2) for n, start in cases], float)
    iteration, prefill, attended = relative(terms, whole, known)
    return {
        "unit": "picoseconds",
        "products": {str(n): _ps(time) for n, time in products.items()},
        "decode": decode,
        "prompts": {
            "iteration": _ps(iteration),
            "prefill": _ps(prefill),
            "chunk_context": _ps(attended),
        },
        "request": round(REQUEST_S * PS),
        **_source(name, model, served, built),
    }


@contextmanager
def _listed(model: str) -> Iterator[str]:
    """Yield what the package knows a model by: its name, or a folder with its configuration where
    the package has one and does not list it, as for Mixtral.
    """
    from aiconfigurator_core.sdk.common import DefaultHFModels

    with TemporaryDirectory() as folder:
        if model not in DefaultHFModels:
            name = f"{model.replace('/', '--')}_config.json"
            file = files("aiconfigurator_core") / "model_configs" / name
            if file.is_file():
                write(Path(folder) / "config.json", file.read_text("utf-8"))
                model = folder
        yield model


def _ps(milliseconds: float) -> int:
    return round(SLOWER * milliseconds * MS * PS)


def _source(name: str, model: str, served: ServedModel, built: Any) -> dict[str, Any]:
    """Return what a file of the costs says of their origin and of the server."""
    versions = {PACKAGE: version(PACKAGE), "vllm": VLLM.get(served.gpu, "0.24.0")}
    remarks = []
    if built._num_heads == built._num_kv_heads:
        remarks.append(
            f"{model} has no grouped queries: times of such a model were foreseen 22 to 117% too "
            "long."
        )
    if served.gpus > 1 and served.gpu in OVER_PCIE:
        remarks.append(
            f"Tensor parallelism over PCIe ({served.gpus} × {served.gpu}): latencies of a real run "
            "were foreseen 22% too short."
        )
    if "Mixtral-8x7B" in model:
        remarks.append(
            "Mixtral-8x7B: latencies of eight real runs on two H100 were foreseen 15 to 29% too "
            "long."
        )
    settings = served.settings()
    settings["kv_cache"] = f"{served.blocks(settings)}blocks"
    about = f"{served.gpus} × {served.gpu}" if served.gpus > 1 else served.gpu
    return {
        "estimate": f"{model} on {about}: kernels measured by NVIDIA ({PACKAGE} "
        f"{versions[PACKAGE]}, vLLM {versions['vllm']}), times {SLOWER:g}",
        "model": model,
        "command": f"python -m simulate.kernels {name}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "factor": SLOWER,
        "served": asdict(served),
        "remarks": remarks,
        "residuals": {"held_out": {"of_runs_percent": RUNS_PERCENT}},
        "config": settings,
    }


def values(name: str) -> dict[str, Any]:
    """Return costs, as a file has them, by kernels:GPU,MODEL[,tpN] or by the name of a file. Raises
    ValueError.
    """
    gpu, _, rest = name.removeprefix(KERNELS).partition("," if name.startswith(KERNELS) else "-")
    if name.startswith(KERNELS):
        gpu = next((each for each, its in GPUS.items() if gpu in (each, its.system)), gpu)
        model, _, tp = rest.partition(",tp")
    else:
        gpu = next((each for each in GPUS if name.startswith(each + "-")), gpu)
        short, _, tp = name.removeprefix(gpu + "-").partition("-tp")
        model = MODELS.get(short, "")
    if gpu not in GPUS or not model or not (tp or "1").isdecimal():
        raise ValueError(
            f"{name!r} names no kernels; write {KERNELS}GPU,MODEL,tpN with a GPU of "
            f"{', '.join(GPUS)}, or GPU-MODEL-tpN with a model of {', '.join(MODELS)}"
        )
    return of_kernels(name, gpu, model, int(tp or 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m simulate.kernels", description="Write costs to results/costs."
    )
    parser.add_argument("names", nargs="+", metavar="GPU-MODEL[-tpN]")
    for name in parser.parse_args().names:
        try:
            save_json(FOLDER / f"{name}.json", values(name))
        except ValueError as error:
            sys.exit(printable(f"error: {error}"))


if __name__ == "__main__":
    main()
