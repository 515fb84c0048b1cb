"""Checkpoints are computed as Hugging Face computes them, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config.config import Config
from config.settings import ConfigError
from config.shapes import SHAPES, shape_of
from generate import weights
from generate.attention import KernelAttention
from generate.auto import build
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.loading import load_generator
from generate.sampling import sample_on_cpu
from generate.weights import WeightsUnavailable, expected_tensors, locate
from model import KVCache, causal_attention
from scheduling.inference import Inference, Row
from tests.generate.broken import NO_WEIGHTS, assert_odd_files_are_refused

SIZES: dict[str, Any] = {"n_layer": 3, "n_head": 3, "n_embd": 48, "n_positions": 64}
SIZES["vocab_size"] = 257
Tensors = dict[str, torch.Tensor]


def saved(folder: Path, prefix: bool = True, **fields: Any) -> Path:
    """A model with weights large enough that every field matters; names with a prefix as
    GPT2LMHeadModel saves them, or without as GPT2Model does.
    """
    # not above: all workers would load it, which takes 4 s
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, initializer_range=0.3, **fields)).eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a mistake
        parameter.data += 0.05 * torch.randn_like(parameter)
    (model if prefix else model.transformer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def edited(checkpoint: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Save the checkpoint after an edit of its tensors, for `locate` to find."""

    def save(edit: Callable[[Tensors], None]) -> Path:
        (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        tensors = load_file(checkpoint / "model.safetensors")
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return save


def config_of(folder: Path, **settings: Any) -> Config:
    return build("dynamic", {"model": str(folder), **settings}, {})


def described(folder: Path, **fields: Any) -> Path:
    """A checkpoint's config.json alone."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **fields}))
    return folder


@pytest.mark.parametrize("fields", [
    {},
    {"scale_attn_by_inverse_layer_idx": True},
    {"scale_attn_weights": False},
    {
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "layer_norm_epsilon": 0.3,
    },
    {"activation_function": "gelu_pytorch_tanh", "n_inner": 192},
    {"reorder_and_upcast_attn": True},
    {"n_ctx": 32},  # as Hugging Face's course trains a GPT-2 of 1,024 positions
], ids=lambda fields: "-".join(fields))  # fmt: skip
def test_logits_equal_hugging_faces_for_any_field(fields: dict[str, Any], tmp_path: Path) -> None:
    """Such fields were not read, and checkpoints were served with other logits than their own;
    n_ctx was, and one that is not n_positions was refused.
    """
    from transformers import GPT2LMHeadModel

    saved(tmp_path, prefix="n_inner" not in fields, **fields)
    reference = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    config = config_of(tmp_path, dtype="float32")
    assert config.max_model_len == 64
    assert config.shape.parameters == sum(p.numel() for p in reference.parameters())
    model = load_model(config.shape, locate(config), 0, torch.float32, "cpu")
    ids = torch.randint(0, 257, (50,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        plain = model(ids, torch.arange(50), causal_attention, torch.arange(50))
        assert (plain - expected).abs().max() < 1e-4
        row = Row(Inference(ids.tolist(), 1), 0, 50, list(range(4)), samples=True, idle=False)
        attention = KernelAttention(KVCache(config.shape, 4, 16, torch.float32, "cpu"))
        unpacked = CachedGenerator(model, 257, attention, sample_on_cpu, max_tokens=50)
        engine = load_generator(config, locate(config), 257)  # packed layers
        for generator in (unpacked, engine):
            assert isinstance(generator, CachedGenerator)
            assert (generator.logits([row])[0] - expected[-1]).abs().max() < 1e-4


NOT_SERVED = [
    ("activation_function", "relu"),
    ("activation_function", "gelu"),  # by the error function
    ("tie_word_embeddings", False),
    ("add_cross_attention", True),
    ("n_inner", 96),
    ("quantization_config", {"load_in_8bit": True}),
    ("pruned_heads", {"0": [1]}),
    ("scale_attn_weights", "no"),
]


@pytest.mark.parametrize(("fields", "message"), [
    *(({name: value}, f"says {name} .* can be served; choose") for name, value in NOT_SERVED),
    ({"model_type": "llama"}, "'llama' model"),
    ({"n_embd": 10}, "make no GPT-2"),
    ({"n_embd": "wide"}, "wide"),
    (None, "no config.json"),
])  # fmt: skip
def test_what_is_no_gpt2_that_can_be_served_is_refused(
    fields: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    if fields is not None:
        described(tmp_path, **SIZES | fields)
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path)


@pytest.mark.parametrize("vocab_size", [300, 50304])
def test_a_vocabulary_of_no_tokenizer_needs_one_named(vocab_size: int, tmp_path: Path) -> None:
    """Anything from 50,257 on was taken for GPT-2's, and anything smaller for bytes."""
    described(tmp_path, **SIZES | {"vocab_size": vocab_size})
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path)
    known = "--tokenizer r50k_base (50,257 ids) or --tokenizer bytes (257 ids)"
    assert f"{vocab_size:,} ids" in str(caught.value) and known in str(caught.value)
    for tokenizer in ("bytes", "r50k_base")[: 1 + (vocab_size > 50257)]:
        assert config_of(tmp_path, tokenizer=tokenizer).tokenizer == tokenizer


def test_named_sizes_have_the_parameters_they_are_known_by() -> None:
    names = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    assert [round(SHAPES[name].parameters / 1e6) for name in names] == [124, 355, 774, 1558]


def transpose(tensors: Tensors) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].T.contiguous()


def untie(tensors: Tensors) -> None:
    head = tensors["transformer.wte.weight"].clone()
    head[200, 3] += 1
    tensors["lm_head.weight"] = head


def round_all(tensors: Tensors) -> None:
    tensors |= {name: tensor.to(torch.int8) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("edit", "message"), [
    (lambda t: t.pop("transformer.h.1.mlp.c_fc.bias"), r"no tensor h\.1\.mlp\.c_fc\.bias"),
    (transpose, r"h\.0\.attn\.c_attn\.weight has shape \(144, 48\), .* wants \(48, 144\)"),
    (untie, r"lm_head\.weight differs from transformer\.wte\.weight"),
    (round_all, r"wte\.weight holds I8; save it as floating-point numbers"),
])  # fmt: skip
def test_tensors_that_cannot_be_served_are_named(edit: Any, message: str, edited: Any) -> None:
    with pytest.raises(WeightsUnavailable, match=message):
        locate(config_of(edited(edit)))


def test_a_copy_of_the_embedding_and_attention_mask_buffers_are_ignored(edited: Any) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    folder = edited(add)
    assert locate(config_of(folder)) == folder / "model.safetensors"
    shape = shape_of(str(folder))
    names = weights.check(folder / "model.safetensors", shape)
    assert set(names) == set(expected_tensors(shape))


def test_a_folder_keeps_the_name_by_which_it_was_given(checkpoint: Path, tmp_path: Path) -> None:
    """A link's clients had to name the folder that it led to."""
    link = tmp_path / "mine"
    link.symlink_to(checkpoint)
    config = config_of(link)
    assert config.model_name == "mine" and locate(config) == link / "model.safetensors"


def test_a_folder_that_holds_anything_is_a_checkpoint_or_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Deep JSON, infinite and huge numbers ended in a traceback, and a pipe was waited for."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "odd"))
    settings, tensors = folder / "config.json", folder / "model.safetensors"

    def refused() -> bool:
        try:
            config = config_of(folder, tokenizer="bytes")
            if path := locate(config):
                load_model(config.shape, path, 0, torch.float32, "cpu")
        except (ConfigError, WeightsUnavailable) as error:
            assert 0 < len(str(error)) < 1000
            return True
        return False

    names = [*SIZES, "layer_norm_epsilon", "model_type", "n_inner", "scale_attn_weights"]
    assert_odd_files_are_refused(settings, names, tensors, refused)


@pytest.mark.parametrize("number", NO_WEIGHTS)
def test_weights_that_are_no_numbers_are_refused_by_name(number: float, edited: Any) -> None:
    """Every text was token 0."""
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = edited(lambda t: t[name].view(-1)[7].fill_(number))
    config = config_of(folder)
    with pytest.raises(WeightsUnavailable, match=f"{name} has values that are no numbers"):
        load_model(config.shape, locate(config), 0, torch.float32, "cpu")


def test_weights_that_are_not_there_are_fetched_once_or_the_error_names_the_ways_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    config = build("dynamic", {"model": "gpt2", "tokenizer": "bytes"}, {})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_session", unreachable)
    ways = "--weights random .*--model demo, .*local Hugging Face GPT-2"
    with pytest.raises(WeightsUnavailable, match=ways):
        locate(config)
    file = checkpoint / "model.safetensors"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: str(file))
    monkeypatch.setattr(weights, "check", lambda path, shape: {})
    assert locate(config) == file
    with pytest.raises(WeightsUnavailable, match=r"save .* as one file \(max_shard_size\)"):
        locate(config_of(described(tmp_path, n_layer=1)))
    monkeypatch.setattr(weights, "DEMO", tmp_path)
    with pytest.raises(WeightsUnavailable, match="git checkout, or use --weights random"):
        locate(build("dynamic", {"model": "demo"}, {}))


def test_random_weights_are_the_same_for_the_same_seed_alone() -> None:
    shape = SHAPES["demo"]
    one, same, other = (load_model(shape, None, seed, torch.float32, "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.wte.weight, other.wte.weight)
