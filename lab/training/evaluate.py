"""Measure `demo`:  .venv/bin/python -m lab.training.evaluate

Bits per byte on held_out.txt beside those of xz and gzip, and completions to read. Everything is
seeded; it takes a minute or two.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from config import Config, ConfigError
from config.settings import VOCABULARIES
from config.shapes import SHAPES
from generate.auto import build, physical_cores
from generate.checkpoint import load_model
from generate.loading import load_generator
from generate.tokenizer import load_tokenizer
from generate.weights import WeightsUnavailable, locate
from lab.training import HELD_OUT
from lab.training.corpus import load_corpus
from model import GPT2
from scheduling.building import build_scheduler
from scheduling.inference import Inference
from scheduling.sampling import Sampling
from simulate import drive

PROMPTS = [
    "The function returns",
    "Return True if",
    "A list is a sequence that",
    "When an exception is raised in the body of the loop,",
    "This module provides classes for",
    "To read a file line by line,",
    'The "with" statement',
    "Raises ValueError if",
]


def causal_logits(model: GPT2, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits after every token of equally long sequences: [B, T] -> [B × T, V]."""
    b, t = ids.shape

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(b, t, *qkv.shape[1:]).transpose(1, 3).unbind(2)  # 3 × [B, H, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return model(ids.flatten(), positions.flatten(), attend, torch.arange(b * t))


@torch.inference_mode()
def bits_of_bytes(model: GPT2, text: bytes, context: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return −log₂ of each byte's probability, and how many bytes it was predicted from: [N − 1],
    without the first byte. Windows of `context` bytes start every `stride` bytes, and a byte counts
    in the first that has it.
    """
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    bits, before, counted = [], [], 1
    for start in range(0, max(len(ids) - 1 - context + stride, 1), stride):
        window = ids[start : start + context + 1]
        positions = torch.arange(len(window) - 1)
        logits = causal_logits(model, window[None, :-1], positions[None])
        new = start + len(window) - counted
        bits.append(F.cross_entropy(logits[-new:], window[-new:], reduction="none") / math.log(2))
        before.append(positions[-new:] + 1)
        counted += new
    return torch.cat(bits), torch.cat(before)


def bits_per_byte(model: GPT2, text: bytes, context: int) -> float:
    """Return bits per byte, all but the first half window predicted from at least half a window."""
    return bits_of_bytes(model, text, context, stride=context // 2)[0].mean().item()


@torch.inference_mode()
def likeliest(model: GPT2, text: bytes, context: int) -> Tensor:
    """Return the byte that is likeliest after each of text, in windows of `context` bytes: [N]."""
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(context)
    logits = [causal_logits(model, ids[None], torch.arange(len(ids))[None]) for ids in windows]
    return torch.cat(logits).argmax(-1)


def complete(config: Config, prompts: Sequence[str], num_tokens: int, heat: float) -> list[str]:
    """Return a server's completions at this temperature; their seeds are 0, 1, 2, …"""
    tokenizer = load_tokenizer(config.tokenizer)
    generator = load_generator(config, locate(config), tokenizer.n_vocab)
    inferences = [
        Inference(tokenizer.encode_ordinary(prompt), num_tokens, Sampling(heat, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    drive(build_scheduler(config), [(0.0, inferences)], lambda _: 0.0, generator.generate)
    return [tokenizer.decode(inference.tokens) for inference in inferences]


def report(name: str) -> Iterator[str]:
    """Yield the lines of generate/demo/README.md that are measured. Raises ConfigError,
    WeightsUnavailable or OSError.
    """
    config, own = _config(name), Path(name) / "held_out.txt"
    text = (own if own.exists() else HELD_OUT).read_bytes()
    model, n = _load(config), config.shape.n_ctx
    yield f"| on held_out.txt, {len(text):,} bytes | bits per byte |\n| --- | --: |"
    bits, _ = bits_of_bytes(model, text, n, stride=n // 2)
    parameters = f"{config.shape.parameters / 1e6:.2f}M parameters"
    yield f"| {Path(name).name}, {parameters} | {bits.mean():.3f} |"
    corpus = load_corpus()
    if corpus.held_out == text:
        copied = torch.tensor(corpus.copied_bytes()[1:])
        share = f"{copied.float().mean():.0%} that are copied in the training text"
        yield f"| … without the {share} | {bits[~copied].mean():.3f} |"
    bits, before = bits_of_bytes(model, text, n, stride=n)
    for low, high in ((0, n // 8), (n // 8, n // 2), (n // 2, n)):
        part = bits[(before > low) & (before <= high)]
        yield f"| … predicted from {low + 1:,} to {high:,} bytes | {part.mean():.3f} |"
    xz = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    for program, packed in (("xz -9e", xz), ("gzip -9", gzip.compress(text, 9, mtime=0))):
        yield f"| {program} | {8 * len(packed) / len(text):.3f} |"
    if config.shape != SHAPES["demo"]:
        same = likeliest(model, text, n) == likeliest(_load(_config("demo")), text, n)
        yield f"\nIts likeliest byte is demo's in {same.float().mean():.1%} of places."
    n = min(200, n - max(map(len, PROMPTS)))
    yield f"\nCompletions of {n} bytes at temperature 0.8:"
    for prompt, completion in zip(PROMPTS, complete(config, PROMPTS, n, 0.8)):
        yield f"\n```\n{prompt}▸{completion}\n```"


def _config(name: str) -> Config:
    config = build("dynamic", {"model": name, "tokenizer": "bytes"}, {})
    shape, least = config.shape, max(map(len, PROMPTS)) + 1
    if name == "fake" or shape.vocab_size != VOCABULARIES["bytes"] or shape.n_ctx < least:
        raise ConfigError(
            f"{name} is no model of bytes with a context of {least} or more; name demo, "
            "demo-draft, or a folder that lab.training.train wrote"
        )
    return config


def _load(config: Config) -> GPT2:
    return load_model(config.shape, locate(config), 0, torch.float32, "cpu")


def main() -> None:
    parser = argparse.ArgumentParser("python -m lab.training.evaluate", description=__doc__)
    about = "demo, demo-draft, or the folder that lab.training.train wrote (default: demo)"
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help=about)
    torch.set_num_threads(physical_cores())
    try:
        for line in report(parser.parse_args().model):
            print(line, flush=True)
    except (ConfigError, WeightsUnavailable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
