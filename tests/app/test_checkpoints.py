"""Fields of config.json that change what a model computes: served as Hugging Face computes them, or
refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import Config, ConfigError, build
from generate import load_generator
from generate.attention import KernelAttention
from generate.cached import CachedGenerator
from generate.sampling import sample_on_cpu
from model import KVCache, causal_attention, load_model
from scheduling.inference import Inference, Row
from shapes import shape_of
from weights import WeightsUnavailable, locate

SIZES: dict[str, Any] = {
    "n_layer": 3,
    "n_head": 3,
    "n_embd": 48,
    "n_positions": 64,
    "vocab_size": 257,
}


def saved(folder: Path, **fields: Any) -> None:
    """A model with weights large enough that every field matters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3, **fields)).eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a mistake
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def config_of(folder: Path, **settings: Any) -> Config:
    return build("dynamic", {"model": str(folder), **settings}, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "layer_norm_epsilon": 0.3,
        },
        {"layer_norm_epsilon": 0.2},
        {
            "activation_function": "gelu_pytorch_tanh",
            "n_inner": 192,
            "reorder_and_upcast_attn": True,
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_field_that_changes_the_function_is_computed_as_hugging_face_does(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """They were read by nobody: such a checkpoint was served with other logits than its own."""
    from transformers import GPT2LMHeadModel

    saved(tmp_path, **fields)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    config = config_of(tmp_path, dtype="float32")
    model = load_model(config.shape, locate(config), 0, torch.float32, "cpu")
    ids = torch.randint(0, 257, (50,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        found = model(ids, torch.arange(50), causal_attention, torch.arange(50))
        assert (found - expected).abs().max() < 1e-4
        row = Row(Inference(ids.tolist(), 1), 0, 50, list(range(4)), samples=True, idle=False)
        attention = KernelAttention(KVCache(config.shape, 4, 16, torch.float32, "cpu"))
        cached = CachedGenerator(model, 257, attention, sample_on_cpu, max_tokens=50).logits([row])
        assert (cached[0] - expected[-1]).abs().max() < 1e-4
        engine = load_generator(config, locate(config), 257)  # packed layers
        assert isinstance(engine, CachedGenerator)
        assert (engine.logits([row])[0] - expected[-1]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "relu"),
        ("activation_function", "gelu"),  # by the error function
        ("tie_word_embeddings", False),
        ("add_cross_attention", True),
        ("n_inner", 96),
        ("quantization_config", {"load_in_8bit": True}),
        ("pruned_heads", {"0": [1]}),
        ("scale_attn_weights", "no"),
    ],
)
def test_a_field_that_cannot_be_served_is_refused_by_name(
    field: str, value: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **SIZES, field: value}))
    with pytest.raises(
        ConfigError, match=f"config.json says {field} .* can be served; choose another --model"
    ):
        config_of(tmp_path)


def test_sizes_are_read_by_either_of_hugging_faces_names(tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "max_position_embeddings": 99,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, **sizes})
    )
    shape = shape_of(str(tmp_path))
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.n_ctx) == (5, 2, 32, 99)


def test_a_head_of_its_own_is_refused_and_a_copy_of_the_embedding_is_not(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors["transformer.wte.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, path)
    assert locate(config_of(tmp_path)) == path
    head[200, 3] += 1
    save_file(tensors | {"lm_head.weight": head}, path)
    with pytest.raises(
        WeightsUnavailable, match=r"lm_head\.weight differs from transformer\.wte\.weight"
    ):
        locate(config_of(tmp_path))


def test_weights_that_are_integers_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(
        WeightsUnavailable, match=r"wte\.weight holds I8; save it as floating-point numbers"
    ):
        locate(config_of(tmp_path))


@pytest.mark.parametrize("vocab_size", [300, 50304])
def test_a_vocabulary_that_is_no_tokenizers_own_needs_one_named(
    vocab_size: int, tmp_path: Path
) -> None:
    """Anything from 50,257 on was taken for GPT-2's, and anything smaller for bytes."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", **SIZES, "vocab_size": vocab_size})
    )
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path)
    said = str(caught.value)
    assert (
        f"{vocab_size:,} ids" in said
        and "--tokenizer r50k_base (50,257 ids) or --tokenizer bytes (257 ids)" in said
    )
    assert config_of(tmp_path, tokenizer="bytes").tokenizer == "bytes"
    if vocab_size > 50257:
        assert config_of(tmp_path, tokenizer="r50k_base").tokenizer == "r50k_base"
