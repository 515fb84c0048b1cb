"""Train `demo`:  .venv/bin/python -m lab.training.train  (--draft: `demo-draft`)

Writes model.safetensors (16-bit) and config.json, Hugging Face's form of a GPT-2, and held_out.txt,
the text that its bits per byte are measured on. On one machine the same command arrives at the same
weights. The choices worth varying stand in `Recipe`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer

from client.arguments import folder
from client.saving import write
from config.shapes import SHAPES, Shape
from generate.auto import native_bfloat16, physical_cores
from generate.weights import DEMO
from lab.training.corpus import Corpus, load_corpus
from lab.training.evaluate import bits_per_byte, causal_logits
from model import GPT2


@dataclass(frozen=True)
class Recipe:
    """The model and its training. A batch is `bytes_per_step` bytes, cut into sequences of the
    phase's context.

    Short contexts come first: with 128 bytes of context the model leaves bigrams behind after 200
    steps, with 1,024 it has not after 400. Their first position is drawn anew for each, so that all
    of wpe learns from the start.
    """

    shape: Shape = SHAPES["demo"]
    steps: int = 6000
    bytes_per_step: int = 4096
    # (until this part of the steps, context)
    phases: tuple[tuple[float, int], ...] = ((0.4, 128), (0.7, 512), (1.0, 1024))
    muon_rate: float = 0.02  # matrices of the blocks (Muon; Jordan et al., 2024)
    adam_rate: float = 3e-3  # embeddings, biases, layer norms
    weight_decay: float = 0.1  # of the matrices
    warm_up: int = 200  # steps
    last_rate: float = 0.02  # of the rates above, where the cosine ends
    clip: float = 1.0  # norm of the gradient
    seed: int = 0
    report: int = 250  # steps between progress lines


DRAFT = Recipe(shape=SHAPES["demo-draft"], steps=2400)


def train(recipe: Recipe, corpus: Corpus) -> GPT2:
    """Train to the last step of the recipe; return the model in float32. A batch depends on the
    seed and the number of its step alone.
    """
    model, text = _initial(recipe), torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    # Muon scales its step for [out, in]; our matrices are [in, out], so the MLP's second learns
    # faster than its first
    muon = Muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay)
    adam = AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    peaks: dict[Optimizer, float] = {muon: recipe.muon_rate, adam: recipe.adam_rate}
    began, losses = time.monotonic(), []
    bf16 = native_bfloat16()  # elsewhere it is emulated, and slow
    print(
        f"{recipe.shape.parameters / 1e6:.2f}M parameters, {len(text):,} bytes of text (SHA-256 "
        f"{corpus.digest}), {recipe.steps:,} steps of {recipe.bytes_per_step:,} bytes in "
        f"{'bfloat16' if bf16 else 'float32'}"
    )
    for step in range(recipe.steps):
        context = next(context for until, context in recipe.phases if step < until * recipe.steps)
        inputs, positions, targets = _batch(text, recipe, step, context)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = causal_logits(model, inputs, positions)
        loss = F.cross_entropy(logits.float(), targets.flatten())
        losses.append(loss.item() / math.log(2))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer, peak in peaks.items():
            for group in optimizer.param_groups:
                group["lr"] = peak * _rate(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        if (done := step + 1) % recipe.report == 0 or done == recipe.steps:
            held_out = bits_per_byte(model, corpus.held_out, context)
            minutes = (time.monotonic() - began) / 60
            print(
                f"step {done:>5,} of {recipe.steps:,}  context {context:>5,}  bits per byte: train "
                f"{np.mean(losses):.3f}, held out {held_out:.3f}  {minutes:.1f} min, "
                f"{minutes * (recipe.steps / done - 1):.0f} to go",
                flush=True,
            )
            losses.clear()
    return model.eval().requires_grad_(False)


def _initial(recipe: Recipe) -> GPT2:
    """Return the model with GPT-2's initial weights, N(0, 0.02); those that end a residual branch
    are divided by √(2 layers).
    """
    model = GPT2(recipe.shape).requires_grad_(True)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
            else:
                std = 0.02 / math.sqrt(2 * recipe.shape.n_layer) if "c_proj" in name else 0.02
                parameter.normal_(0, std, generator=generator)
    return model


def _rate(step: int, recipe: Recipe) -> float:
    """Return a step's part of the peak learning rate: linear warm-up times a cosine to
    `last_rate`.
    """
    cosine = (1 + math.cos(math.pi * step / recipe.steps)) / 2
    falling = recipe.last_rate + (1 - recipe.last_rate) * cosine
    return min(1.0, (step + 1) / recipe.warm_up) * falling


def _batch(text: Tensor, recipe: Recipe, step: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, positions and targets of a step: 3 × int64 [B, T]."""
    rng = np.random.default_rng([recipe.seed, step])
    n = recipe.bytes_per_step // context
    windows = torch.stack(
        [text[start : start + context + 1] for start in rng.integers(0, len(text) - context, n)]
    ).long()
    first = torch.from_numpy(rng.integers(0, recipe.shape.n_ctx - context + 1, n))
    return windows[:, :-1], first[:, None] + torch.arange(context), windows[:, 1:]


def export(model: GPT2, corpus: Corpus, folder: Path) -> None:
    """Write the model in 16 bits, its config.json in Hugging Face's form, and the held-out text."""
    tensors = {
        f"transformer.{name}": parameter.half().contiguous()
        for name, parameter in model.named_parameters()
    }
    write(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    config |= asdict(model.shape) | {"n_positions": model.shape.n_ctx}
    config["trained_on"] = {"text": f"CPython {platform.python_version()}", "sha256": corpus.digest}
    write(folder / "config.json", json.dumps(config, indent=1) + "\n")
    write(folder / "held_out.txt", corpus.held_out)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # of bytes, for Hugging Face's tools
        shutil.copy(DEMO / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser("python -m lab.training.train", description=__doc__)
    parser.add_argument("--out", type=folder, metavar="FOLDER", help="default: runs/demo[-draft]")
    parser.add_argument("--draft", action="store_true", help="the model that drafts for demo")
    args = parser.parse_args()
    out: Path = args.out or Path("runs/demo-draft" if args.draft else "runs/demo")
    torch.set_num_threads(physical_cores())
    corpus = load_corpus()
    shipped = json.loads((DEMO / "config.json").read_text("utf-8"))["trained_on"]
    if corpus.digest != shipped["sha256"]:
        print(f"note: the shipped model learnt from another text, that of {shipped['text']}")
    export(train(DRAFT if args.draft else Recipe(), corpus), corpus, out)
    print(f"wrote {out}; python -m lab.training.evaluate {out} measures it")


if __name__ == "__main__":
    main()
