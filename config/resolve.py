"""What `auto` means, and what is left out: settings that depend on the machine and on
each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import kernels
from shapes import SHAPES, shape_of

AUTO = (
    "model",
    "tokenizer",
    "device",
    "dtype",
    "threads",
    "attention",
    "linear",
    "sampler",
    "norms",
)  # settings of which `auto` is a value
VOCABULARIES = {"r50k_base": 50257, "bytes": 257}
DECODER_BATCH_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # on a GPU, as far as max_batch_size goes


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what is `auto` or left out. Values that are wrong are left to Config; raises
    ValueError with a sentence.
    """
    given = {
        name: value
        for name, value in values.items()
        if not (value in ("", None) or (value == "auto" and name in AUTO))
    }
    usable = given.get("device") != "cpu" and gpu_is_usable()
    device = given.get("device") or ("cuda" if usable else "cpu")
    if device == "cuda" and not usable:
        raise ValueError("device cuda: no GPU is usable here; use --device cpu")
    gpu = device == "cuda"
    model = str(given.get("model") or ("gpt2-medium" if gpu else "demo"))
    if model not in SHAPES and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    shape = shape_of(model)
    defaults = {
        "device": device,
        "dtype": "bfloat16"
        if gpu or (model not in ("demo", "fake") and native_bfloat16())
        else "float32",
        "weights": "random" if model == "fake" else "pretrained",
        # the other cores are for HTTP and the client: with two threads demo is 1.1 times faster and
        # the client of a comparison on the same two cores sends late
        "threads": 1 if model in ("demo", "fake") else physical_cores(),
        "max_batch_size": 256 if gpu else 32,
        "max_model_len": min(1024, shape.n_ctx),
        "token_budget": 2048 if gpu else 256,
    }
    resolved = defaults | given | {"model": model}
    if "tokenizer" not in given:
        resolved["tokenizer"] = _tokenizer_of(model, shape.vocab_size)
    for name in ("request_log", "record"):  # the server runs in a folder of its own
        if path := str(resolved.get(name) or ""):
            resolved[name] = str(Path(path).expanduser().absolute())
    if not gpu and model != "fake" and resolved.get("generator") != "naive":
        reason = kernels.why_unavailable()
        for name in ("attention", "linear", "sampler", "norms"):
            if reason and resolved.get(name) in ("kernel", "int8"):
                raise ValueError(
                    f"{name} {resolved[name]} cannot be used here: {reason}; or leave --{name} out"
                )
        compiled = reason is None
        in_bfloat16 = resolved["dtype"] == "bfloat16"
        if in_bfloat16 and not onednn_multiplies_bfloat16():
            linear = "kernel" if compiled else "plain"
        else:
            linear = "onednn" if not compiled or (in_bfloat16 and takes_onednn()) else "kernel"
        resolved.setdefault(
            "attention",
            "kernel" if compiled and shape.head_size <= kernels.LARGEST_HEAD else "plain",
        )
        resolved.setdefault("linear", linear)
        for name in ("sampler", "norms"):
            resolved.setdefault(name, "kernel" if compiled else "plain")
    if gpu:
        for name, head_size in (("attention", shape.head_size), ("norms", 0)):
            reason = kernels.why_no_triton(head_size)
            if resolved.get(name) == "triton" and reason:
                raise ValueError(
                    f"{name} triton cannot be used here: {reason}; or leave --{name} out"
                )
            resolved.setdefault(name, "plain" if reason else "triton")
        if resolved.get("generator") != "naive" and model != "fake":
            with contextlib.suppress(
                ValueError, TypeError
            ):  # a max_batch_size that is no number is Config's to refuse
                most = int(resolved["max_batch_size"])
                resolved.setdefault(
                    "decoder_batch_sizes",
                    tuple(size for size in DECODER_BATCH_SIZES if size <= most),
                )
    elif "kv_blocks" not in resolved:
        resolved.setdefault("kv_cache_gb", 4.0)
    return resolved


def _tokenizer_of(model: str, vocab_size: int) -> str:
    for name, size in VOCABULARIES.items():
        if vocab_size == size:
            return name
    known = " or ".join(f"--tokenizer {name} ({size:,} ids)" for name, size in VOCABULARIES.items())
    raise ValueError(
        f"{model} has a vocabulary of {vocab_size:,} ids, which is no tokenizer's own; name one: "
        f"{known}"
    )


def physical_cores() -> int:
    """Physical cores that this process may use."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))


def native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively; elsewhere float32 is faster."""
    return not _instructions().isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def takes_onednn() -> bool:
    """Whether bfloat16 is left to oneDNN: our kernel lacks Arm's instructions, and has never run
    with AMX's.
    """
    return not _instructions().isdisjoint({"amx_bf16", "bf16"})


def onednn_multiplies_bfloat16() -> bool:
    """Whether oneDNN packs bfloat16 weights for this processor; where it does not it raises."""
    known = _instructions()
    return {"avx512bw", "avx512dq", "avx512vl"} <= known or not known.isdisjoint(
        {"avx_ne_convert", "bf16"}
    )


def _instructions() -> set[str]:
    """Of this processor, as /proc/cpuinfo names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {
        flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()
    }


def gpu_is_usable() -> bool:
    """torch takes seconds to import: it is asked only where there is a driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()
