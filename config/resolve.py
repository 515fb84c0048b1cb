"""The meaning of `auto`: settings that depend on the machine and on each other."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from config.shapes import SHAPES, shape_of
from config.tables import flag
from generate import kernels

OPERATIONS = ("attention", "linear", "sampler", "norms")  # parts of the engine
# settings of which `auto` is a value
AUTO = ("model", "tokenizer", "device", "dtype", "threads", *OPERATIONS)
VOCABULARIES = {"r50k_base": 50257, "bytes": 257}
DECODER_BATCH_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # on a GPU, as far as max_batch_size goes


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what is `auto` or left out. Raises ValueError; Config refuses what else is wrong."""
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
    model, (kind, colon, draft) = _in_full(model), str(given.get("draft", "")).partition(":")
    if kind == "model" and draft:
        given["draft"] = kind + colon + _in_full(draft)
    shape = shape_of(model)
    small = model in ("demo", "fake")
    resolved = {
        "device": device,
        "dtype": "bfloat16" if gpu or (not small and native_bfloat16()) else "float32",
        "weights": "random" if model == "fake" else "pretrained",
        # the other cores are for HTTP and the client: with two threads demo is 1.1 times faster and
        # the client of a comparison on the same two cores sends late
        "threads": 1 if small else physical_cores(),
        "max_batch_size": 256 if gpu else 32,
        "max_model_len": min(1024, shape.n_ctx),
        "token_budget": 2048 if gpu else 256,
        **given,
        "model": model,
    }
    if "tokenizer" not in given:
        resolved["tokenizer"] = _tokenizer_of(model, shape.vocab_size)
    for name in ("request_log", "record"):  # the server runs in a folder of its own
        if path := str(resolved.get(name) or ""):
            resolved[name] = os.path.abspath(os.path.expanduser(path))
    # a share of a GPU's memory, in an environment that several machines share
    if not gpu and str(resolved.get("kv_cache", "%")).endswith("%"):
        resolved["kv_cache"] = "4GB"
    generator = "none" if model == "fake" else resolved.get("generator", "cached")
    parts: dict[str, str] = {}
    if resolved.get("kernels") == "plain":
        parts = dict.fromkeys(OPERATIONS, "plain")
    elif generator in ("cached", "padded"):
        parts = _fastest_parts(resolved, shape.head_size, gpu)
    if generator == "padded":
        parts["attention"] = "plain"
    if gpu and generator == "cached":
        # a max_batch_size that is no number is Config's to refuse
        with contextlib.suppress(ValueError, TypeError):
            most = int(resolved["max_batch_size"])
            sizes = tuple(size for size in DECODER_BATCH_SIZES if size <= most)
            resolved.setdefault("decoder_batch_sizes", sizes)
    return parts | resolved


def _fastest_parts(chosen: Mapping[str, Any], head_size: int, gpu: bool) -> dict[str, str]:
    """Return the fastest parts of the engine. Raises ValueError for a missing choice."""
    if gpu:
        reasons = dict.fromkeys(("attention", "norms", "linear"), kernels.why_no_triton(0))
        reasons |= {"attention": kernels.why_no_triton(head_size)}
    else:
        reasons = dict.fromkeys(OPERATIONS, kernels.why_unavailable())
    ours = ("triton",) if gpu else ("kernel", "int8")
    for name, reason in reasons.items():
        if reason and chosen.get(name) in ours:
            raise ValueError(
                f"{name} {chosen[name]} cannot be used here: {reason}; or leave {flag(name)} out"
            )
    parts = {name: "plain" if reason else ours[0] for name, reason in reasons.items()}
    if gpu:
        if chosen.get("lora") or chosen.get("lora_random"):
            parts["linear"] = "plain"
    else:
        if head_size > kernels.LARGEST_HEAD:
            parts["attention"] = "plain"
        in_bfloat16 = chosen["dtype"] == "bfloat16"
        prefers_onednn = reasons["linear"] or (in_bfloat16 and takes_onednn())
        if prefers_onednn and (not in_bfloat16 or onednn_multiplies_bfloat16()):
            parts["linear"] = "onednn"
    return parts


def _in_full(model: str) -> str:
    """Return a model's name, or the whole path of its folder."""
    folder = os.path.expanduser(model)
    return os.path.realpath(folder) if model not in SHAPES and os.path.isdir(folder) else model


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
    """Return the number of physical cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))


def native_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively; elsewhere float32 is faster."""
    return not _instructions().isdisjoint({"amx_bf16", "avx512_bf16", "bf16"})


def takes_onednn() -> bool:
    """Return whether bfloat16 is oneDNN's: our kernel is not made for Arm, nor tried with AMX."""
    return not _instructions().isdisjoint({"amx_bf16", "bf16"})


def onednn_multiplies_bfloat16() -> bool:
    """Return whether oneDNN packs bfloat16 weights for this processor; else it raises."""
    known = _instructions()
    return {"avx512bw", "avx512dq", "avx512vl"} <= known or not known.isdisjoint(
        {"avx_ne_convert", "bf16"}
    )


def _instructions() -> set[str]:
    """Return the instruction sets of this processor, as /proc/cpuinfo names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    listed = [line for line in lines if line.startswith(("flags", "Features"))]
    return {word for line in listed for word in line.split()}


def gpu_is_usable() -> bool:
    """Return whether torch has a GPU; it takes seconds to import, so only beside a driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()
