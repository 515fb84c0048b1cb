"""The architecture as numbers: how large a model is, before torch is imported or a weight is read.

The launcher refuses what cannot fit by this arithmetic; `model.py` builds the same shape. Every
field of a checkpoint's config.json that changes the computation is here, or refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.reading import read_json

GPT2_REPOSITORIES = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
# Fields that change the computation besides those of Shape, and the values that can be served.
# Dropouts belong to training, summaries to another head; reorder_and_upcast_attn changes rounding.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
}
LARGEST_SIZE = 10**6
# heads that kernels of attention take: as in attention.cpp; and GPT-2's, since in float32 a Triton
# program with wider ones needs more shared memory than small GPUs have
LARGEST_HEAD = {"kernel": 256, "triton": 64}
LARGEST_RANK = 64  # an adapter's; as in lora.h
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT-2, in the names of its paper's released configuration."""

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    @property
    def parameters(self) -> int:
        """Weights, with the LM head tied to the token embedding."""
        e = self.n_embd
        block = 12 * e * e + 13 * e  # attention 4e² + 4e, MLP 8e² + 5e, two layer norms 4e
        return self.n_layer * block + (self.vocab_size + self.n_ctx + 2) * e

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    def query_factor(self, layer: int) -> float:
        """Return the factor of a layer's queries that makes scores over √head_size this model's."""
        factor = 1.0 if self.scale_attn_weights else self.head_size**0.5
        return factor / (layer + 1) if self.scale_attn_by_inverse_layer_idx else factor

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes of a token's keys and values; int8 has a float32 scale for each head."""
        head = self.head_size + 4 if kv_dtype == "int8" else self.head_size * DTYPE_BYTES[kv_dtype]
        return 2 * self.n_layer * self.n_head * head

    def step_bytes(self, rows: int, context: int, weights: str, kv_dtype: str) -> int:
        """Return the bytes that an iteration of decode rows must read: every weight but the
        position embeddings, and live KV.
        """
        read = self.parameters - self.n_ctx * self.n_embd
        return read * DTYPE_BYTES[weights] + rows * context * self.kv_bytes_per_token(kv_dtype)

    def head_bytes(self, weights: str) -> int:
        """Return the bytes of the LM head's weights."""
        return self.vocab_size * self.n_embd * DTYPE_BYTES[weights]

    def step_flops(self, rows: int, context: int) -> int:
        """Return its floating-point operations: two a weight and row, two an element of the KV."""
        head = self.vocab_size * self.n_embd
        return 2 * rows * (self._matrices + head + 2 * context * self.n_layer * self.n_embd)

    def weight_bytes(self, dtype: str, weights: str) -> int:
        """Return the bytes of all weights. weights: type of the linear layers', dtype: others'."""
        others = self.parameters - self._matrices
        return others * DTYPE_BYTES[dtype] + self._matrices * DTYPE_BYTES[weights]

    @property
    def _matrices(self) -> int:
        """Elements of the linear layers' weights."""
        return self.n_layer * 12 * self.n_embd**2


SHAPES = {
    "demo": Shape(n_layer=2, n_head=4, n_embd=256, vocab_size=257),
    "demo-draft": Shape(n_layer=1, n_head=3, n_embd=192, vocab_size=257),  # its draft model
    "fake": Shape(n_layer=1, n_head=1, n_embd=1, vocab_size=257, n_ctx=2**20),  # has no tensors
    "gpt2": Shape(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": Shape(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": Shape(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": Shape(n_layer=48, n_head=25, n_embd=1600),
}


def shape_of(model: str) -> Shape:
    """Return the shape of a named model or of a local Hugging Face GPT-2 folder.

    Raises ValueError, with a sentence that names the fix, for anything else.
    """
    if model in SHAPES:
        return SHAPES[model]
    folder = os.path.expanduser(model)
    if not os.path.isdir(folder):
        known = ", ".join(SHAPES)
        raise ValueError(f"model {model[:256]!r} is neither a folder nor one of {known}")
    path = Path(folder, "config.json")
    if not path.is_file():  # a pipe or a device may have no end
        raise ValueError(
            f"folder {model!r} has no config.json; save the checkpoint with save_pretrained()"
        )
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error!s:.200}") from None
    try:
        if config.get("model_type", "gpt2") != "gpt2":
            kind = config["model_type"]
            raise ValueError(f"{path} describes a {kind!r:.50} model; only GPT-2 can be served")
        # wpe has n_positions; an n_ctx beside it is not read by Hugging Face either
        config["n_ctx"] = config.get("n_positions", config.get("n_ctx", 1024))
        # Hugging Face's defaults
        names = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024, "vocab_size": 50257}
        sizes = {name: config.get(name, default) for name, default in names.items()}
        for name, size in sizes.items():
            if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
                raise ValueError(
                    f"{path} says {name} {size!r:.50}, and a GPT-2 has 1 to {LARGEST_SIZE:,}; "
                    "choose another --model"
                )
        epsilon = config.get("layer_norm_epsilon", 1e-5)
        if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
            raise ValueError(
                f"{path} says layer_norm_epsilon {epsilon!r:.50}, and a GPT-2 has a small number; "
                "choose another --model"
            )
        for name, offered in (ONLY | {"n_inner": (None, 4 * sizes["n_embd"])}).items():
            if config.get(name, offered[0]) not in offered:
                values = " or ".join(json.dumps(value) for value in offered)
                raise ValueError(
                    f"{path} says {name} {json.dumps(config[name]):.200}, and only {values} can be "
                    f"served; choose another --model"
                )
        shape = Shape(
            **sizes,
            layer_norm_epsilon=epsilon,
            scale_attn_weights=config.get("scale_attn_weights", True),
            scale_attn_by_inverse_layer_idx=config.get("scale_attn_by_inverse_layer_idx", False),
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as a GPT-2 configuration: {error}") from None
    if shape.n_embd % shape.n_head:
        raise ValueError(f"{path} has sizes that make no GPT-2: {shape}")
    return shape
