"""Costs of a machine that is not here: an estimate from published numbers, by the roofline.

An operation takes as long as reading its bytes or as doing its arithmetic, whichever is longer
(Williams, Waterman and Patterson, CACM 52(4), 2009). Operations follow one another, so an iteration
takes

    max(weights ÷ bandwidth, products ÷ peak)     of the layers, for the tokens of rows and prompts
    + max(weights ÷ bandwidth, products ÷ peak)   of the LM head, for rows alone
    + context · max(KV ÷ bandwidth, products ÷ peak)
    + products of the prompts' attention ÷ peak
    + launches · time of a launch                 of our products, norms and attention

Not counted: activations, norms, sampling, and what launches outside a CUDA graph take longer. Knows
neither torch nor numpy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from config.shapes import SHAPES
from simulate.loop import PS

PREFIX = "roofline:"
# shares of bandwidth and peak that are reached: steps of this engine on a CPU (results/engine)
FEWEST, REACHED, MOST = 0.5, 0.7, 0.9
MARK = f" (an estimate: times {REACHED / MOST:.2f} to {REACHED / FEWEST:.2f})"
LAUNCHES = 7, 6  # per layer, and around all layers: 174 for gpt2-medium, counted on an H200
LAUNCH_S = 1.3e-6  # in a CUDA graph on an H100 (Spector et al., "Look Ma, No Bubbles!", 2025)
MODELS = [name for name in SHAPES if name != "fake"]
DTYPES = ("float32", "bfloat16")


class Device(NamedTuple):
    """A device in its maker's numbers: float32 without tensor cores, bfloat16 without sparsity."""

    gb_per_s: float  # memory's bandwidth
    float32: float  # TFLOP/s
    bfloat16: float
    memory_gb: float = 0.0  # 0: a CPU, which has no launches


DEVICES = {
    "h100": Device(3350, 67, 989, 80),  # SXM; NVIDIA's data sheets, here and below
    "h200": Device(4800, 67, 989, 141),  # SXM
    "a100": Device(2039, 19.5, 312, 80),  # SXM, 80 GB
    "l4": Device(300, 30.3, 121, 24),
    "rtx4090": Device(1008, 82.6, 165.2, 24),  # NVIDIA's Ada architecture paper
}


def values(name: str) -> dict[str, Any]:
    """Return costs as a file has them, of roofline:h100,gpt2,bfloat16. Raises ValueError."""
    word, model, dtype = _words(name)
    device, shape = _device(word), SHAPES[model]
    assert device
    tflops = getattr(device, dtype)
    bandwidth, peak = REACHED * device.gb_per_s * 1e9, REACHED * tflops * 1e12
    on_gpu = device.memory_gb > 0
    of_layer, around = LAUNCHES
    launches = (of_layer * shape.n_layer + around) * on_gpu
    row, head = shape.step_flops(1, 0), 2 * shape.vocab_size * shape.n_embd
    attended = shape.step_flops(1, 1) - row  # by a token, of one position
    read, head_read = shape.step_bytes(0, 0, dtype, dtype), shape.head_bytes(dtype)
    launched = launches * LAUNCH_S

    def products(n_bytes: int, flops: int, around: float = 0.0) -> dict[int, float]:
        """Seconds by the number of tokens: level up to where arithmetic takes as long as bytes."""
        level = n_bytes / bandwidth
        knee = max(1, math.floor(level * peak / flops))
        counts = {1, knee, knee + 1, 2 * knee + 2}
        return {n: around + max(level, n * flops / peak) for n in counts}

    context = max(shape.kv_bytes_per_token(dtype) / bandwidth, attended / peak)
    rows = products(head_read, head, launched)
    of_layers = products(read - head_read, row - head)
    config: dict[str, Any] = {"model": model, "dtype": dtype, "weights": "random"}
    config |= {"tokenizer": "bytes", "device": "cpu", "kv_cache": "4GB"}
    if on_gpu:
        kv_gb = 0.9 * device.memory_gb - shape.weight_bytes(dtype, dtype) / 1e9
        config |= {"device": "cuda", "kv_cache": f"{kv_gb:.1f}GB"}
        config |= {"max_batch_size": 256, "token_budget": 2048}
    range_percent = [100 * (REACHED / share - 1) for share in (MOST, REACHED, FEWEST)]
    return {
        "products": {str(n): _ps(time) for n, time in of_layers.items()},
        "decode": {
            str(n): {"iteration": _ps(time), "context": _ps(context)} for n, time in rows.items()
        },
        "prompts": {"chunk_context": _ps(attended / peak)},
        "estimate": f"{REACHED:.0%} (from {FEWEST:.0%} to {MOST:.0%}) of {device.gb_per_s:,g} GB/s "
        f"and {tflops:,g} TFLOP/s" + f", {launches} launches of {1e6 * LAUNCH_S:g} µs" * on_gpu,
        "residuals": {"held_out": {"of_runs_percent": range_percent}},  # as uncertain for --find
        "config": config,
    }


def _ps(seconds: float) -> int:
    return round(seconds * PS)


def marked(name: str) -> str:
    """Return the name as results have it."""
    return name.removesuffix(MARK) + MARK


def _words(name: str) -> list[str]:
    words = name.removesuffix(MARK).removeprefix(PREFIX).split(",")
    if len(words) == 3 and _device(words[0]) and words[1] in MODELS and words[2] in DTYPES:
        return words
    raise ValueError(
        f"{name!r} names no estimate; write {PREFIX}DEVICE,MODEL,DTYPE with a device of "
        f"{', '.join(DEVICES)} or cpu:GBPS:GFLOPS (its GB/s and GFLOP/s), a model of "
        f"{', '.join(MODELS)}, and {' or '.join(DTYPES)}"
    )


def _device(word: str) -> Device | None:
    """Return a known device, or a CPU by what it is stated to do; None for other words."""
    kind, *numbers = word.split(":")
    if kind != "cpu" or len(numbers) != 2:
        return DEVICES.get(word)
    try:
        gb_per_s, gflops = map(float, numbers)
    except ValueError:
        return None
    stated = Device(gb_per_s, gflops / 1e3, gflops / 1e3)
    return stated if all(0 < value < math.inf for value in stated[:2]) else None
