"""What `auto` means on this machine: settings that depend on it and on each other.

`config.flags.build` and `config.flags.parse` are handed `resolve`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from config.checks import AHEAD_WITHOUT
from config.config import Config
from config.flags import build as build_config
from config.settings import PARTS, VOCABULARIES, flag, meaningful
from config.shapes import LARGEST_HEAD, SHAPES, shape_of
from generate import kernels

# settings of which `auto` is a value
AUTO = ("model", "tokenizer", "device", "dtype", "threads", "http_processes", *PARTS)
DECODER_BATCH_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # on a GPU, as far as max_batch_size goes


def build(mode: str, flags: Mapping[str, Any], values: Mapping[str, str]) -> Config:
    """Return a mode's Config on this machine. Raises ConfigError."""
    return build_config(mode, flags, values, resolve)


def warnings(of: Config) -> list[str]:
    """Return what the user should know but need not change, on this machine too."""
    cached = of.generator == "cached" and of.model != "fake"
    if not cached or of.attention != "plain" or of.kernels != "auto":
        reason = None
    elif of.device == "cpu":
        reason = kernels.why_unavailable()
        slower = "attention and sampling run on PyTorch's own operations, a call a row"
    else:
        reason = kernels.why_no_triton(of.shape.head_size)
        slower = "attention calls PyTorch once a row, and without CUDA graphs"
    slow = [f"{slower}, which is slower: {reason}"] if reason else []
    return [*slow, *of.warnings()]


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what is `auto` or left out. Raises ValueError for what this machine does not have."""
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
    # where our attention cannot be, PyTorch's would make texts in bfloat16 depend on the batch
    takes_bfloat16 = not gpu and not small and shape.head_size <= LARGEST_HEAD["kernel"]
    resolved = {
        "device": device,
        "dtype": "bfloat16" if gpu or (takes_bfloat16 and native_bfloat16()) else "float32",
        "weights": "random" if model == "fake" else "pretrained",
        # the other cores are for HTTP and the client: with two threads demo is 1.1 times faster and
        # the client of a comparison on the same two cores sends late
        "threads": 1 if small else physical_cores(),
        # on a CPU the engine wants the cores itself
        "http_processes": min(8, max(1, (os.cpu_count() or 1) // 4)) if gpu else 1,
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
    in_bfloat16 = resolved["dtype"] == "bfloat16" and not gpu
    if in_bfloat16 and given.get("linear") == "onednn" and not onednn_multiplies_bfloat16():
        raise ValueError(
            "linear onednn has no bfloat16 for this processor, which has neither AVX-512 nor "
            "bfloat16 of its own; leave --linear out, or use --dtype float32"
        )
    generator = "none" if model == "fake" else resolved.get("generator", "cached")
    parts: dict[str, str] = {}
    if resolved.get("kernels") == "plain":
        parts = dict.fromkeys(PARTS, "plain")
    elif generator in ("cached", "padded"):
        parts = _fastest_parts(resolved, shape.head_size, gpu)
    if generator == "padded":
        parts["attention"] = "plain"
        if gpu:  # where its rectangles have not run with ours
            parts["linear"] = "plain"
    if gpu and generator == "cached":
        # a max_batch_size that is no number is Config's to refuse
        with contextlib.suppress(ValueError, TypeError):
            most = int(resolved["max_batch_size"])
            sizes = tuple(size for size in DECODER_BATCH_SIZES if size <= most)
            resolved.setdefault("decoder_batch_sizes", sizes)
        resolved.setdefault("ahead", _may_plan_ahead(resolved))
    return parts | resolved


def _may_plan_ahead(chosen: Mapping[str, Any]) -> bool:
    """Return whether nothing is chosen that excludes plans ahead."""
    without = {**AHEAD_WITHOUT, "speculate": 0}
    return all(
        str(chosen.get(name, value)) == str(value)
        for name, value in without.items()
        if meaningful(name, str(chosen.get("mode")))
    )


def _fastest_parts(chosen: Mapping[str, Any], head_size: int, gpu: bool) -> dict[str, str]:
    """Return the fastest parts of the engine with which a request's text does not depend on the
    batch: ours, or PyTorch's where ours cannot be. Raises ValueError for a part that is not here.
    """
    if gpu:
        reasons = {"attention": kernels.why_no_triton(head_size)}
        reasons["linear"] = kernels.why_no_triton(0)
    else:
        reasons = dict.fromkeys(PARTS, kernels.why_unavailable())
    ours = ("triton",) if gpu else ("kernel", "int8")
    for name, reason in reasons.items():
        if reason and chosen.get(name) in ours:
            raise ValueError(
                f"{name} {chosen[name]} cannot be used here: {reason}; or leave {flag(name)} out"
            )
    parts = {name: "plain" if reason else ours[0] for name, reason in reasons.items()}
    if gpu:
        # in float32 ours are slow, and beside adapters they have not run on a GPU yet
        if chosen["dtype"] != "bfloat16" or chosen.get("lora") or chosen.get("lora_random"):
            parts["linear"] = "plain"
        return parts
    if head_size > LARGEST_HEAD["kernel"]:
        parts["attention"] = "plain"
    return parts


def _in_full(model: str) -> str:
    """Return a model's name, or the whole path of its folder."""
    folder = os.path.expanduser(model)
    return os.path.abspath(folder) if model not in SHAPES and os.path.isdir(folder) else model


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
    """Return whether the processor has instructions with which our kernels multiply bfloat16.
    Elsewhere they are faster in float32, and a library's bfloat16 makes texts depend on the batch.
    """
    return "avx512_bf16" in _instructions() and not kernels.why_unavailable()


def onednn_multiplies_bfloat16() -> bool:
    """Return whether oneDNN packs bfloat16 weights for this processor; else it raises."""
    known = _instructions()
    return {"avx512bw", "avx512dq", "avx512vl"} <= known or not known.isdisjoint(
        {"avx_ne_convert", "bf16"}
    )


def _instructions() -> set[str]:
    """Return the instruction sets of this processor, as /proc/cpuinfo names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
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
