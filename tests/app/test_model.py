"""The model against Hugging Face's GPT-2, and what happens to checkpoints that are not right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import weights
from config import ConfigError, build
from generate.attention import KernelAttention
from generate.cached import CachedGenerator
from generate.sampling import sample_on_cpu
from model import KVCache, causal_attention, load_model
from scheduling.inference import Inference, Row
from shapes import SHAPES, shape_of
from weights import WeightsUnavailable, check, expected_tensors, locate

SIZES: dict[str, Any] = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "n_positions": 64,
    "vocab_size": 260,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights with names as GPT2LMHeadModel saves them, and as GPT2Model does."""
    # not above: all workers would load it, which takes 4 s
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(0)
    sizes = GPT2Config(**SIZES)
    model = GPT2LMHeadModel(sizes).eval()
    for parameter in model.parameters():  # biases start at zero, which would hide a mistake
        parameter.data += 0.02 * torch.randn_like(parameter)
    folders = {name: tmp_path_factory.mktemp(name) for name in ("with_prefix", "without_prefix")}
    model.save_pretrained(folders["with_prefix"])
    base = GPT2Model(sizes)
    base.load_state_dict(model.transformer.state_dict())
    base.save_pretrained(folders["without_prefix"])
    return folders


@pytest.mark.parametrize("name", ["with_prefix", "without_prefix"])
def test_logits_equal_hugging_faces(checkpoints: dict[str, Path], name: str) -> None:
    from transformers import GPT2LMHeadModel

    folder = checkpoints[name]
    reference = GPT2LMHeadModel.from_pretrained(folder).eval()
    config = build("dynamic", {"model": str(folder), "tokenizer": "bytes"}, {})
    assert config.max_model_len == 64
    path = locate(config)
    assert path is not None
    model = load_model(config.shape, path, 0, torch.float32, "cpu")
    ids = torch.randint(0, 260, (50,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
        found = model(ids, torch.arange(50), causal_attention, torch.arange(50))
        assert (found - expected).abs().max() < 1e-4
        row = Row(Inference(ids.tolist(), 1), 0, 50, list(range(4)), samples=True, idle=False)
        cache = KVCache(config.shape, 4, 16, torch.float32, "cpu")
        cached = CachedGenerator(
            model, 257, KernelAttention(cache), sample_on_cpu, max_tokens=50
        ).logits([row])
        assert (cached[0] - expected[-1]).abs().max() < 1e-4


def test_the_shape_of_a_folder_is_read_from_its_config(checkpoints: dict[str, Path]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = shape_of(str(checkpoints["with_prefix"]))
    assert (shape.n_layer, shape.n_head, shape.n_embd, shape.n_ctx, shape.vocab_size) == (
        3,
        4,
        48,
        64,
        260,
    )
    model = GPT2LMHeadModel(GPT2Config(**SIZES))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_named_sizes_have_the_parameters_they_are_known_by() -> None:
    millions = {
        name: round(shape.parameters / 1e6)
        for name, shape in SHAPES.items()
        if name.startswith("gpt2")
    }
    assert millions == {"gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
    assert SHAPES["demo"].parameters <= 3.9e6


def edited(checkpoints: dict[str, Path], tmp_path: Path, edit: object) -> Path:
    tensors = load_file(checkpoints["without_prefix"] / "model.safetensors")
    edit(tensors)  # type: ignore[operator]
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return path


def test_a_missing_tensor_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = edited(checkpoints, tmp_path, lambda tensors: tensors.pop("h.1.mlp.c_fc.bias"))
    with pytest.raises(WeightsUnavailable, match=r"no tensor h\.1\.mlp\.c_fc\.bias"):
        check(path, shape_of(str(checkpoints["with_prefix"])))


def test_a_tensor_of_the_wrong_size_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors["h.0.attn.c_attn.weight"] = tensors["h.0.attn.c_attn.weight"].T.contiguous()

    path = edited(checkpoints, tmp_path, transpose)
    with pytest.raises(
        WeightsUnavailable,
        match=r"h\.0\.attn\.c_attn\.weight has shape \(144, 48\), .* wants \(48, 144\)",
    ):
        check(path, shape_of(str(checkpoints["with_prefix"])))


def test_a_truncated_file_names_the_tensor_it_ends_in(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    whole = (checkpoints["with_prefix"] / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[: len(whole) // 2])
    shape = shape_of(str(checkpoints["with_prefix"]))
    with pytest.raises(
        WeightsUnavailable, match=r"damaged .*ends inside tensor transformer\.h\.\d"
    ):
        check(path, shape)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(WeightsUnavailable, match="damaged or no safetensors file"):
        check(path, shape)


def test_attention_mask_buffers_of_old_checkpoints_are_ignored(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = edited(
        checkpoints,
        tmp_path,
        lambda tensors: tensors.update({"h.0.attn.bias": torch.ones(1, 1, 64, 64)}),
    )
    names = check(path, shape_of(str(checkpoints["with_prefix"])))
    assert set(names) == set(expected_tensors(shape_of(str(checkpoints["with_prefix"]))))


def test_without_a_network_the_error_names_the_ways_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_session", unreachable)
    with pytest.raises(WeightsUnavailable) as caught:
        locate(build("dynamic", {"model": "gpt2", "tokenizer": "bytes"}, {}))
    assert all(
        way in str(caught.value)
        for way in ("--weights random", "--model demo", "local Hugging Face GPT-2")
    )


def test_weights_are_fetched_once_and_found_in_the_cache_after(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    file = checkpoints["with_prefix"] / "model.safetensors"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **kwargs: str(file))
    monkeypatch.setattr(weights, "check", lambda path, shape: {})
    assert locate(build("dynamic", {"model": "gpt2"}, {})) == file


def test_folders_that_are_no_gpt2_are_refused(tmp_path: Path) -> None:
    for content, said in (
        (None, "no config.json"),
        ("{", "cannot be read"),
        (json.dumps({"model_type": "llama"}), "'llama' model"),
        (json.dumps({"model_type": "gpt2", "n_embd": 10, "n_head": 3}), "make no GPT-2"),
        (json.dumps({"model_type": "gpt2", "n_embd": "wide"}), "wide"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=said):
            build("dynamic", {"model": str(tmp_path)}, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1}))
    with pytest.raises(WeightsUnavailable, match="does not exist"):
        locate(build("dynamic", {"model": str(tmp_path)}, {}))


def test_random_weights_are_the_same_for_the_same_seed_alone() -> None:
    shape = SHAPES["demo"]
    one, same, other = (load_model(shape, None, seed, torch.float32, "cpu") for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.wte.weight, other.wte.weight)
