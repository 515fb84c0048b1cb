"""Train `demo`:  .venv/bin/python -m demo.train

Writes model.safetensors (16-bit) and config.json, Hugging Face's form of a GPT-2, and held_out.txt,
the text that its bits per byte are measured on. Stop it with Ctrl-C and run it again: it goes on
from its last checkpoint and, on the same machine, arrives at the same weights.

The choices worth varying stand in `Recipe`.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer

from config.resolve import physical_cores
from demo.corpus import Corpus, load_corpus
from demo.evaluate import bits_per_byte, causal_logits
from model import GPT2
from shapes import SHAPES, Shape
from weights import DEMO


@dataclass(frozen=True)
class Recipe:
    """What is trained and how.

    A batch is `bytes_per_step` bytes, cut into sequences of the phase's context.

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
    report: int = 250  # steps between progress lines, each with a checkpoint


class CheckpointUnusable(Exception):
    """A checkpoint that is damaged, or of another recipe or text; the message names the way on."""


def train(
    recipe: Recipe, corpus: Corpus, checkpoint: Path, say: Callable[[str], None] = print
) -> GPT2:
    """Train to the last step of `recipe`, going on from `checkpoint` if it is there.

    Returns the model in float32. A batch depends on the seed and the number of its step alone, so a
    run that was interrupted arrives at the weights of one that was not, on the same machine. Raises
    CheckpointUnusable.
    """
    model, optimizers = _start(recipe)
    text = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
    step, before_s = _resume(checkpoint, recipe, corpus, model, optimizers)
    began, losses = time.monotonic() - before_s, []
    cpu = torch.cpu.get_capabilities()
    # elsewhere it is emulated, and slow
    bf16 = any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    say(
        f"{recipe.shape.parameters / 1e6:.2f}M parameters, {len(text):,} bytes of text (SHA-256 "
        f"{corpus.digest}), {recipe.steps:,} steps of {recipe.bytes_per_step:,} bytes in "
        f"{'bfloat16' if bf16 else 'float32'}, from step {step:,}"
    )
    while step < recipe.steps:
        context = next(context for until, context in recipe.phases if step < until * recipe.steps)
        inputs, positions, targets = _batch(text, recipe, step, context)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = causal_logits(model, inputs, positions)
        loss = F.cross_entropy(logits.float(), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _rate(step, recipe)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
        step += 1
        if step % recipe.report == 0 or step == recipe.steps:
            held_out = bits_per_byte(model, corpus.held_out, context)
            spent_s = time.monotonic() - began
            _save(checkpoint, recipe, corpus, model, optimizers, step, spent_s)
            say(
                f"step {step:>5,} of {recipe.steps:,}  context {context:>5,}  bits per byte: train "
                f"{np.mean(losses):.3f}, held out {held_out:.3f}  {spent_s / 60:.1f} min, "
                f"{spent_s / 60 * (recipe.steps / step - 1):.0f} left"
            )
            losses.clear()
    return model.eval().requires_grad_(False)


def _start(recipe: Recipe) -> tuple[GPT2, list[Optimizer]]:
    """The model with GPT-2's initial weights, N(0, 0.02).

    Those that end a residual branch are divided by √(2 layers).
    """
    model = GPT2(recipe.shape).requires_grad_(True)
    generator = torch.Generator().manual_seed(recipe.seed)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
            else:
                std = 0.02 / math.sqrt(2 * recipe.shape.n_layer) if "c_proj" in name else 0.02
                parameter.normal_(0, std, generator=generator)
            (matrices if name.startswith("h.") and parameter.ndim == 2 else others).append(
                parameter
            )
    # Muon scales its step for [out, in]; our matrices are [in, out], so the MLP's second learns
    # faster than its first
    muon = Muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay)
    adam = AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return model, [muon, adam]


def _rate(step: int, recipe: Recipe) -> float:
    """A step's part of the peak learning rate: linear warm-up times a cosine to `last_rate`."""
    cosine = (1 + math.cos(math.pi * step / recipe.steps)) / 2
    return min(1.0, (step + 1) / recipe.warm_up) * (
        recipe.last_rate + (1 - recipe.last_rate) * cosine
    )


def _batch(text: Tensor, recipe: Recipe, step: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, positions and targets of a step: 3 × int64 [B, T]."""
    rng = np.random.default_rng([recipe.seed, step])
    n = recipe.bytes_per_step // context
    windows = torch.stack(
        [text[start : start + context + 1] for start in rng.integers(0, len(text) - context, n)]
    ).long()
    first = torch.from_numpy(rng.integers(0, recipe.shape.n_ctx - context + 1, n))
    return windows[:, :-1], first[:, None] + torch.arange(context), windows[:, 1:]


def _save(
    path: Path,
    recipe: Recipe,
    corpus: Corpus,
    model: GPT2,
    optimizers: list[Optimizer],
    step: int,
    spent_s: float,
) -> None:
    state: dict[str, Any] = {
        "recipe": asdict(recipe),
        "corpus": corpus.digest,
        "step": step,
        "spent_s": spent_s,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    half_written = path.with_suffix(".part")
    torch.save(state, half_written)
    half_written.replace(path)


def _resume(
    path: Path, recipe: Recipe, corpus: Corpus, model: GPT2, optimizers: list[Optimizer]
) -> tuple[int, float]:
    """Load a checkpoint if there is one; return its step and the seconds it took to get there."""
    if not path.exists():
        return 0, 0.0
    try:
        state = torch.load(path)
        state["step"], state["spent_s"], state["model"], state["optimizers"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError):
        raise CheckpointUnusable(f"{path} is damaged; delete it to train from the start") from None
    for what, ours in (("recipe", asdict(recipe)), ("corpus", corpus.digest)):
        if state[what] != ours:
            raise CheckpointUnusable(
                f"{path} was made with another {what}; delete it to train from the start"
            )
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    return state["step"], state["spent_s"]


def export(model: GPT2, corpus: Corpus, folder: Path) -> None:
    """Write the model in 16 bits, its config.json in Hugging Face's form, and the held-out text."""
    tensors = {
        f"transformer.{name}": parameter.half().contiguous()
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = model.shape
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": "float16",
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_ctx": shape.n_ctx,
        "n_positions": shape.n_ctx,
        "vocab_size": shape.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "trained_on": {"text": f"CPython {platform.python_version()}", "sha256": corpus.digest},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "held_out.txt").write_bytes(corpus.held_out)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # of bytes, for Hugging Face's tools
        shutil.copy(DEMO / name, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m demo.train", description="Train the demo model."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/demo"),
        metavar="FOLDER",
        help="what it writes and resumes from (default: %(default)s)",
    )
    folder: Path = parser.parse_args().out
    checkpoint = folder / "checkpoint.pt"
    torch.set_num_threads(physical_cores())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a folder that cannot be written is an error now, not minutes later
        (folder / "held_out.txt").touch()
        corpus = load_corpus()
        shipped = json.loads((DEMO / "config.json").read_text())["trained_on"]
        if corpus.digest != shipped["sha256"]:
            print(
                f"note: the shipped model learnt from {shipped['text']}; the text of this Python "
                f"is another",
                file=sys.stderr,
            )
        export(
            train(Recipe(), corpus, checkpoint, lambda line: print(line, flush=True)),
            corpus,
            folder,
        )
        checkpoint.unlink()
    except CheckpointUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write to {folder} ({error}); choose another --out", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run it again to go on from the last line above", file=sys.stderr)
        return 130
    print(f"wrote {folder}; python -m demo.evaluate {folder} measures it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
