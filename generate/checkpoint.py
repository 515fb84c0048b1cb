"""Weights of a model: a checkpoint's, or seeded random ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from config.shapes import Shape
from generate.weights import LARGEST_WEIGHT, WeightsUnavailable, check
from model import GPT2, Block


def load_model(shape: Shape, path: Path | None, seed: int, dtype: torch.dtype, device: str) -> GPT2:
    """Return the model with a safetensors file's weights; if `path` is None, seeded random ones.

    Raises WeightsUnavailable for a file that does not fit.
    """
    model = GPT2(shape).to(device, dtype)
    if path is None:
        _randomise(model, seed)
    else:
        names = check(path, shape)
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for ours, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(names[ours]))
                if not max(map(abs, torch.aminmax(parameter))) <= LARGEST_WEIGHT:  # or NaN
                    raise WeightsUnavailable(
                        f"{path}: tensor {names[ours]} has values that are no numbers or beyond "
                        f"{LARGEST_WEIGHT:g}; fetch it again, or choose another --model"
                    )
    _scale_queries(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _scale_queries(model: GPT2) -> None:
    """Scale attention as config.json says, through the weights that make the queries.

    So every way to attend stays as it is.
    """
    for layer, block in enumerate(model.h):
        assert isinstance(block, Block)
        # weight [E, 3E] and bias [3E]; the first E columns are the queries'
        for parameter in block.attn.c_attn.parameters():
            parameter[..., : model.shape.n_embd] *= model.shape.query_factor(layer)


@torch.no_grad()
def _randomise(model: GPT2, seed: int) -> None:
    """Seeded weights: embeddings N(0, 0.02), linear layers N(0, 1 / √inputs).

    GPT-2's own 0.02 everywhere leaves the residual stream to the token embedding, and since the LM
    head is tied to it, greedy completions repeat the prompt's last token for ever: equal outputs
    would then prove nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "ln_" in name:
            parameter.fill_(1.0)
        else:
            std = 0.02 if name.startswith("w") else parameter.shape[0] ** -0.5
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
