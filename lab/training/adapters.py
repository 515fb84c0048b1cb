"""Train demo's adapters:  .venv/bin/python -m lab.training.adapters

Two LoRA adapters (Hu et al., ICLR 2022) of rank 8, so that one batch shows three texts: the model's
own, one in capitals, and one as a list. Writes PEFT's form of each to adapters/NAME.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from client.arguments import folder
from client.saving import write
from config.shapes import SHAPES
from generate.auto import physical_cores
from generate.checkpoint import load_model
from generate.weights import DEMO
from lab.training.corpus import Corpus, load_corpus
from lab.training.evaluate import bits_per_byte, causal_logits
from model import GPT2

RANK, ALPHA = 8, 16
TARGETS = (("attn", "c_attn"), ("mlp", "c_fc"))  # half of them, so that files stay small
STEPS, SEQUENCES, CONTEXT, RATE = 400, 16, 256, 4e-3


def listed(text: str) -> str:
    """Return the sentences, an item of a list each."""
    sentences = re.split(r"(?<=[.:!?])\s+|\n\n+", text)
    return "".join(
        f"* {' '.join(sentence.split())}\n" for sentence in sentences if sentence.strip()
    )


STYLES: dict[str, Callable[[str], str]] = {"capitals": str.upper, "list": listed}


class Lora(nn.Module):
    """A linear layer and its adapter: x W + b + (x Aᵀ) Bᵀ · alpha ÷ rank."""

    def __init__(self, base: nn.Module):
        super().__init__()
        n_in, n_out = base.get_parameter("weight").shape
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, n_in) / n_in**0.5)
        self.b = nn.Parameter(torch.zeros(n_out, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * (ALPHA / RANK)


def adapted(model: GPT2) -> dict[str, Lora]:
    """Give the model's layers an adapter each; return them by PEFT's names."""
    found = {}
    for i, (part, name) in itertools.product(range(model.shape.n_layer), TARGETS):
        owner = model.get_submodule(f"h.{i}.{part}")
        setattr(owner, name, lora := Lora(owner.get_submodule(name)))
        found[f"base_model.model.transformer.h.{i}.{part}.{name}"] = lora
    return found


def train(style: Callable[[str], str], corpus: Corpus) -> dict[str, Tensor]:
    """Return the tensors of an adapter that has learnt the style."""
    torch.manual_seed(0)
    model = load_model(SHAPES["demo"], DEMO / "model.safetensors", 0, torch.float32, "cpu")
    layers = adapted(model)
    parameters = [p for lora in layers.values() for p in (lora.a, lora.b)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    text = torch.frombuffer(bytearray(style(corpus.train.decode()).encode()), dtype=torch.uint8)
    for step in range(STEPS):
        starts = torch.randint(0, len(text) - CONTEXT, (SEQUENCES,))
        windows = torch.stack([text[at : at + CONTEXT + 1] for at in starts]).long()
        first = torch.randint(0, model.shape.n_ctx - CONTEXT, (SEQUENCES, 1))
        logits = causal_logits(model, windows[:, :-1], first + torch.arange(CONTEXT))
        loss = F.cross_entropy(logits, windows[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:>3}: {loss.item() / 0.6931:.3f} bits per byte", flush=True)
    styled = style(corpus.held_out.decode()).encode()
    print(f"held out: {bits_per_byte(model, styled, CONTEXT):.3f} bits per byte")
    return {
        f"{name}.lora_{side}.weight": tensor.detach().bfloat16().contiguous()
        for name, lora in layers.items()
        for side, tensor in (("A", lora.a), ("B", lora.b))
    }


def main() -> None:
    torch.set_num_threads(physical_cores())
    parser = argparse.ArgumentParser("python -m lab.training.adapters", description=__doc__)
    parser.add_argument("--out", type=folder, default=Path("runs/adapters"), metavar="FOLDER")
    out: Path = parser.parse_args().out
    corpus = load_corpus()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name for _, name in TARGETS],
        "fan_in_fan_out": True,
        "bias": "none",
        "base_model_name_or_path": "demo",
    }
    for name, style in STYLES.items():
        print(name)
        tensors = train(style, corpus)
        write(out / name / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
        write(out / name / "adapter_config.json", json.dumps(config, indent=1) + "\n")
    print(f"wrote {out}; --lora capitals={out}/capitals,list={out}/list serves them")


if __name__ == "__main__":
    main()
