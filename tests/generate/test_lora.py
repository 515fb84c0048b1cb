"""Adapters of several rows in one batch come to what merged weights come to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from config.shapes import SHAPES, Shape
from generate import auto
from generate.attention import KernelAttention, TritonAttention
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.forward import KernelForward
from generate.loading import load_generator
from generate.lora import Adapter, AdapterError, random_adapter, read_adapter
from generate.memory import OutOfMemory
from generate.sampling import sample, sample_on_cpu
from generate.weights import expected_tensors, locate
from model import GPT2, causal_attention
from scheduling.inference import Inference, Iteration, Row
from tests.counts import nightly_but
from tests.generate.broken import NO_WEIGHTS, assert_odd_files_are_refused
from tests.oracle import PATHS, engine

RANKS = {"one": 1, "eight": 8, "all": 64}
LOADS = [(0, "all"), (2, "eight"), (1, "all"), (0, "one")]
SCALE = 0.25
DTYPES = [torch.float32, torch.bfloat16]


def shape(width: int) -> Shape:
    return Shape(2, 2, width, 64, 300, scale_attn_by_inverse_layer_idx=True)


def trained(name: str, width: int) -> Adapter:
    """An adapter as its training ends; `one` changes some of the layers."""
    tensors = random_adapter(name, RANKS[name], len(name), shape(width)).tensors
    if name == "one":
        del tensors["h.0.mlp.c_fc"], tensors["h.1.attn.c_proj"]
    return Adapter(name, RANKS[name], SCALE, tensors)


def save(folder: Path, adapter: Adapter, edit: Callable[..., Any] = lambda *_: None) -> Path:
    """Save it as PEFT does; edit: of the settings and the tensors."""
    prefix, rslora = "base_model.model.transformer", adapter.rank == 64
    tensors = {
        f"{prefix}.{layer}.lora_{part}.weight": tensor
        for layer, pair in adapter.tensors.items()
        for part, tensor in zip("AB", pair)
    }
    alpha = SCALE * adapter.rank ** (0.5 if rslora else 1)
    settings = {"r": adapter.rank, "lora_alpha": alpha, "use_rslora": rslora, "alpha_pattern": {}}
    settings |= {"init_lora_weights": True, "alora_invocation_tokens": None}
    edit(settings, tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(path: Path, width: int, adapter: Adapter | None = None) -> GPT2:
    """The model of a checkpoint that an adapter was merged into."""
    rng = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(size, generator=rng) * size[0] ** -0.5 + ("ln_" in name)
        for name, size in expected_tensors(shape(width)).items()
    }
    for layer, (a, b) in adapter.tensors.items() if adapter else ():
        tensors[f"{layer}.weight"] += SCALE * (b @ a).T
    save_file(tensors, path)
    return load_model(shape(width), path, 0, torch.float32, "cpu")


def rows() -> tuple[list[Row], list[Row]]:
    """Prompts, then rows that decode, one with drafts; some neighbours have one adapter."""
    prompts, mixed = [], []
    for i, (adapter, n, n_drafts) in enumerate(
        [("one", 1, 0), ("eight", 1, 0), ("eight", 4, 3), ("", 1, 0), ("all", 8, 0), ("", 2, 0)]
    ):
        ids = [(37 * i + 11 * at * at) % 257 for at in range(20 + n)]
        inference, blocks = Inference(ids, 1, adapter=adapter), list(range(8 * i, 8 * i + 8))
        prompts.append(Row(inference, 0, 20, blocks, samples=False, idle=False))
        drafts = ids[len(ids) - n_drafts :]
        mixed.append(Row(inference, 20, n, blocks, samples=True, idle=False, drafts=drafts))
    return prompts, mixed


def computed(generator: CachedGenerator, only: slice = slice(6)) -> list[Tensor]:
    """The logits after each token of the mixed rows."""
    prompts, mixed = (each[only] for each in rows())
    generator.generate(Iteration(prompts, 6, 0, 0, loads=LOADS))
    gone = Row(Inference([1], 1, adapter="gone"), 0, 1, [], samples=True, idle=True)
    logits = generator.logits([*mixed, gone], every=True)
    return [*logits.split([*(row.n_tokens for row in mixed), 1])][:-1]


@pytest.mark.parametrize(
    "path", nightly_but(["plain", "kernels in one call", "triton"], [*PATHS, "triton"])
)
def test_rows_equal_merged_ones(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    width = 96 if path == "kernels in one call" else 48
    if path == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
        parts = (lambda cache: TritonAttention(cache, 300, 64), sample, "plain")
        monkeypatch.setitem(PATHS, path, parts)
    base, file = merged(tmp_path / "model", width), tmp_path / "merged"
    read = [read_adapter(n, save(tmp_path / n, trained(n, width)), shape(width)) for n in RANKS]
    generator = engine(base, 50, 4, path, read, slots=3)
    if path == "triton":  # the mixed rows are a captured pass over 20 tokens
        generator.capture([20], lambda forward: forward)
    models = {name: merged(file, width, trained(name, width)) for name in RANKS} | {"": base}
    for row, logits in zip(rows()[1], computed(generator)):
        ids, end = torch.tensor(row.inference.prompt_ids), 20 + row.n_tokens
        given = ids, torch.arange(end), causal_attention, torch.arange(20, end)
        expected = models[row.inference.adapter](*given)
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert row.inference.adapter == "" or (logits - base(*given)).abs().max() > 0.1


@pytest.mark.parametrize("linear", ["kernel", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_a_base_row_those_of_an_engine_without_adapters(
    dtype: torch.dtype, linear: str, build: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PATHS, linear, (KernelAttention, sample_on_cpu, linear))
    model, adapters = load_model(shape(96), None, 3, dtype, "cpu"), [trained(n, 96) for n in RANKS]
    generator, none = engine(model, 50, 4, linear, adapters), engine(model, 50, 4, linear)
    together, attention = computed(generator), generator.attention
    for logits, near in zip(together, computed(engine(model.float(), 50, 4, "plain", adapters))):
        assert (logits - near).abs().max() < 0.1 * near.abs().max()
    assert isinstance(attention, KernelAttention)
    generator.one_call = KernelForward(generator.model, attention)
    for i, row in enumerate(rows()[1]):
        [alone] = computed(generator, slice(i, i + 1))
        assert torch.equal(alone, together[i])
        assert torch.equal(alone, *computed(none, slice(i, i + 1))) == (not row.inference.adapter)


BASE = "base_model.model."
A = BASE + "transformer.h.1.attn.c_attn.lora_A.weight"
WRONG: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]] = {
    "has r 65 and alpha_pattern .*; train the adapter with a rank": lambda s, t: s.update(r=65),
    "alpha_pattern {'c_fc': 2}; train": lambda s, t: s.update(alpha_pattern={"c_fc": 2}),
    "init_lora_weights 'pissa_niter_4', with which": (
        lambda s, t: s.update(init_lora_weights="pissa_niter_4")
    ),
    r"alora_invocation_tokens \[5\], with which .*; train it without": (
        lambda s, t: s.update(alora_invocation_tokens=[5])
    ),
    r"has no adapter that can be read \(KeyError": lambda s, t: s.pop("r"),
    r"lora_A.weight is \(8, 48\), and rank 4 .* wants \(4, 48\); .* rank_pattern": lambda s, t: (
        s.update(r=4)
    ),
    "h.1.attn.c_attn.lora_A.weight is missing": lambda s, t: t.pop(A),
    "has h.2.attn.* in 2 layers": lambda s, t: t.update({A.replace("h.1", "h.2"): t[A].clone()}),
    "has lm_head.* without biases": lambda s, t: t.update({BASE + "lm_head": t[A].clone()}),
    "has no tensors": lambda s, t: t.clear(),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_adapter_that_cannot_be_served_is_refused_by_name(message: str, tmp_path: Path) -> None:
    """PiSSA's tensors belong to other base weights: they were added to the model's own."""
    folder = save(tmp_path / "refused", trained("eight", 48), WRONG[message])
    with pytest.raises(AdapterError, match=message):
        read_adapter("refused", folder, shape(48))


def refused(folder: Path) -> bool:
    """Whether it is, in a sentence of no more than a few lines; else it has numbers."""
    try:
        adapter = read_adapter("odd", folder, shape(48))
    except AdapterError as error:
        assert 0 < len(str(error)) < 600
        return True
    for a, b in adapter.tensors.values():
        assert a.isfinite().all() and (adapter.scale * b).abs().max() < 1e5
    return False


def test_a_folder_that_holds_anything_is_an_adapter_or_refused(tmp_path: Path) -> None:
    """Deep JSON, "r": 4.0 and huge numbers ended in a traceback, and a pipe was waited for; NaN,
    inf and 1e30 were taken, and every text was token 0.
    """
    folder = save(tmp_path / "odd", trained("eight", 48))
    settings, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    names = ["r", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights"]
    assert_odd_files_are_refused(settings, names, tensors, lambda: refused(folder))
    for r in (4.0, True, "8", 10**400):
        settings.write_text(json.dumps({"r": r, "lora_alpha": 8}))
        assert refused(folder)
    for alpha in (*NO_WEIGHTS, 10**400, "nan", [8]):
        settings.write_text(json.dumps({"r": 8, "lora_alpha": alpha}))
        assert refused(folder)
    for number in NO_WEIGHTS:
        for key in (A, A.replace("_A", "_B")):
            save(folder, trained("eight", 48), lambda s, t: t[key].view(-1)[7].fill_(number))  # noqa: B023
            assert refused(folder)


def test_slots_beyond_the_memory_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's log had a traceback of PyTorch's allocator, and no setting."""
    monkeypatch.setattr("generate.lora.LARGEST_RANK", 10**9)
    server = auto.build("dynamic", {"model": "demo", "lora_random": "2:4"}, {})
    with pytest.raises(OutOfMemory, match=r"machine's memory does not hold demo .*--max-loras"):
        load_generator(server, None, 257)


def test_adapters_of_the_settings_can_be_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path / "mine", random_adapter("", 8, 1, SHAPES["demo"]))
    given = {"model": "demo", "lora": f"mine={folder}", "lora_random": "2:4", "max_loras": 2}
    settings = {**given, "draft": "acceptance:0.5", "speculate": 4}
    server = auto.build("dynamic", settings, {})
    generator = load_generator(server, locate(server), 257)
    asked = [Inference([5], 9, adapter=name) for name in ("mine", "lora-1", "")]
    batch = [Row(each, 0, 1, [], samples=True, idle=False) for each in asked]
    loads = [(0, "lora-0"), (1, "mine"), (0, "lora-1")]
    assert len({*generator.generate(Iteration(batch, 3, 0, 0, loads=loads))}) == 3
    batch[2].inference.adapter = "lora-0"
    with pytest.raises(KeyError):  # it is in no slot any more
        generator.generate(Iteration(batch, 3, 0, 0))
    generator.adapters.remove("lora-0")
    generator.adapters.load(0, "lora-0")  # as an iteration says that was planned before
