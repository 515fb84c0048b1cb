"""The GPU's path on a CPU: kernels in Triton's interpreter, and passes without the capture."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from batching import BatchingManager
from config.config import Config
from config.shapes import Shape
from generate import assembly, auto
from generate.assembly import fitting_blocks
from generate.attention import PlainAttention, TritonAttention
from generate.auto import build
from generate.buffers import SampledIds
from generate.cached import CachedGenerator
from generate.checkpoint import load_model
from generate.loading import load_generator
from generate.memory import OutOfMemory, memory_for
from generate.norms import TritonAddNorm
from generate.sampling import Draws, sample, sample_on_gpu
from model import GPT2, AddNorm, KVCache
from scheduling.inference import Inference, Iteration, Row
from scheduling.policies import Dynamic, NoBatching, Static
from scheduling.sampling import Sampling
from server.asynchronous import AsynchronousManager
from tests.counts import nightly_but
from tests.oracle import N_VOCAB, Guesses, Oracle, enliven, row, serve
from tests.scheduling.test_asynchronous import served
from tests.servers import ROOT

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
from triton.runtime.interpreter import interpreter_builder

from generate.kernels import paged_attention


@pytest.mark.parametrize(("head_size", "dtype"), nightly_but(
    [(16, torch.bfloat16), (24, torch.float32)],
    itertools.product((16, 24), (torch.float32, torch.bfloat16)),
), ids=str)  # fmt: skip
def test_the_kernel_attends_and_stores_as_pytorch_does(dtype: torch.dtype, head_size: int) -> None:
    shape = Shape(n_layer=1, n_head=2, n_embd=2 * head_size, vocab_size=300)
    rng = torch.Generator().manual_seed(0)
    caches = [KVCache(shape, 80, 4, dtype, "cpu") for _ in range(2)]
    caches[0].layers[0].copy_(torch.randn(caches[0].layers[0].shape, generator=rng))
    caches[1].layers[0].copy_(caches[0].layers[0])
    rows = [
        row(150, 1, list(range(39, 77))),  # decodes; two programs share its three rounds of keys
        row(0, 1, []),  # has no blocks any more
        row(0, 37, [1, 3, 5, 7, 9, 11, 13, 15, 17, 0]),  # a prompt of three tiles
        row(6, 21, [2, 4, 6, 8, 10, 12, 14], samples=False),  # a chunk inside a block
        row(3, 1, [38])._replace(idle=True),  # computes its last position again
    ]
    qkv = torch.randn(61, 3, 2, head_size, generator=rng).to(dtype)
    on_gpu = TritonAttention(caches[1], 61, 160)
    parts, arrived = on_gpu.shared
    parts.fill_(math.nan)
    plain, triton = (
        attention.prepare(rows)(0, qkv).float() for attention in (PlainAttention(caches[0]), on_gpu)
    )
    rounds = parts[..., 0].isfinite().sum(1).tolist()
    assert rounds == [3, 3, *[0] * 126], "of both heads of the first row"
    assert not arrived.any(), "the next layer counts anew"
    assert (triton - plain).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)
    assert torch.equal(caches[0].layers[0], caches[1].layers[0])


def test_a_token_attends_with_the_same_bits_in_any_chunk_and_beside_any_row(
    in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # up to five programs share a row of an iteration of 32 tokens or fewer
    for name, value in {"KEYS": 16, "PROGRAMS": 64}.items():
        monkeypatch.setattr(paged_attention, name, value)
    shape = Shape(n_layer=1, n_head=1, n_embd=16, vocab_size=300)
    rng = torch.Generator().manual_seed(0)
    qkv, others = (torch.randn(n, 3, 1, 16, generator=rng) for n in (70, 21))
    beside = [row(0, 20, list(range(20, 25))), row(0, 1, [])]

    def attended(*chunks: int, beside: Sequence[Row] = ()) -> torch.Tensor:
        attention = TritonAttention(KVCache(shape, 30, 4, torch.float32, "cpu"), 100, 160)
        outputs, start = [], 0
        for n in chunks:
            attend = attention.prepare([*beside, row(start, n, list(range(18)))])
            new = torch.cat([*[others] * bool(beside), qkv[start : start + n]])
            outputs.append(attend(0, new)[-n:])
            start += n
        return torch.cat(outputs)

    def backwards(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_idx = x, y, interpreter_builder.grid_dim[2] - 1 - z

    whole = attended(70)
    assert torch.equal(attended(40, 30, beside=beside), whole)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)  # the first one ends last
    for chunks in ([5, 33, 32], [64, 1, 5]):  # five rounds of keys
        assert torch.equal(attended(*chunks), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_addition_and_its_norm_in_one_launch_give_the_same(dtype: torch.dtype) -> None:
    plain = AddNorm(48).to(dtype).requires_grad_(False)
    plain.weight.normal_()
    plain.bias.normal_()
    x, y = (torch.randn(5, 48) * 3).to(dtype), torch.randn(5, 48).to(dtype)
    near = 1e-5 if dtype == torch.float32 else 0.02
    for expected, result in zip(plain(x, y), TritonAddNorm(plain)(x, y)):
        assert torch.allclose(result.float(), expected.float(), near, near)


COMPILE = r"""
import re, subprocess, sys, torch
from itertools import product
from zlib import crc32
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import triton.language as tl
from generate.kernels import add_norm, draw, known, lora, products
from generate.kernels.add_norm import add_norm_kernel
from generate.kernels.paged_attention import KEYS, QUERIES, TILE, attention_kernel, tuned

REDUCED = r"\}\) : \(tensor<[^,>]+, (#\w+)>"
LORA = {n: getattr(lora, n) for n in ("TOKENS", "TILE", "RANKS", "INPUTS", "OUTPUTS")}
LORA["num_stages"] = lora.STAGES
# inputs, outputs and tokens, of gpt2-medium and gpt2-xl: each kernel and tile, whole and in parts
PRODUCTS = {"bf16": [(1024, 3072, 16), (1024, 1024, 4), (1024, 1024, 16), (4096, 1024, 16),
                     (4096, 1024, 32), (1600, 6400, 16), (1024, 3072, 128),
                     (1024, 1024, 128), (4096, 1024, 64), (4096, 1024, 128), (1024, 4096, 256),
                     (1024, 50304, 64), (1024, 3072, 2048), (1600, 6400, 2048)],
            "fp32": [(1024, 4096, 16), (4096, 1024, 16), (1600, 50304, 16)]}
for (name, dtype), architecture in product(
    (("bf16", "bfloat16"), ("fp32", "float32")), map(int, sys.argv[1:])
):
    own = {"DTYPE": getattr(tl, dtype), "DEPENDENT": architecture >= 90}
    sizes = {"N_HEAD": 16, "HEAD": 64, "WIDTH": 64, "BLOCK_SIZE": 16, "SCALE": 0.125}
    sizes |= {"QUERIES": QUERIES, "KEYS": KEYS, "TILE": TILE, "MOST": 16, **own}
    given = dict.fromkeys(("tiles", "tables", "arrived"), "*i32") | {"parts": "*fp32"}
    kernels = [
        *((attention_kernel, given, sizes | {"SPLIT": split} | tuned(getattr(torch, dtype), split))
           for split in (False, True)),
        *((add_norm_kernel, {"rows": "*i64", "n_rows": "i32"} | ({"y": "*fp32"} if pieces else {}),
           {"WIDTH": 1600, "POWER": 2048, "EPSILON": 1e-5, "PIECES": pieces or 1,
            "DEPENDENT": architecture >= 90, "num_warps": add_norm.WARPS}
           | ({} if pieces else {"of_y": None})) for pieces in (0, 13)),
        (lora.lora_kernel, {"memory": "*fp32", "tiles": "*i32", "ranks": "*i32", "stride": "i64",
         "offset": "i32"}, {"N_IN": 1600, "WIDTH": 1600, "N_OUT": 6400, **LORA}),
        (draw.draw_kernel, {"settings": "*i64", "ids": "*i64", "found": "*i32"},
         draw.constants(torch.empty(1, 50304, dtype=getattr(torch, dtype)), 50257)),
        (known.known_kernel, {"ids": "*i64", "kept": "*i64", "out": "*i64", "n_tokens": "i32"},
         {"TOKENS": known.TOKENS}),
    ]
    for n_in, n_out, n_tokens in PRODUCTS[name]:
        whole = n_out > n_in
        kernel, sizes = products.tile(n_tokens, n_in, n_out, getattr(torch, dtype), whole)
        sizes |= {"N_IN": n_in, "N_OUT": n_out, "PIECE": products.PIECE, "GELU": n_out == 4 * n_in}
        given = {"n_tokens": "i32", "out": f"*{name}" if sizes["SPLIT"] == 1 else "*fp32"}
        sizes |= own | dict.fromkeys(("bias",) if n_out == 50304 or sizes["SPLIT"] > 1 else ())
        kernels.append((kernel, given, sizes))
    for kernel, pointers, constants in kernels:
        options = ("num_warps", "num_stages", "maxnreg")
        options = {n: constants.pop(n) for n in options if n in constants}
        types = {n: pointers.get(n, f"*{name}") for n in kernel.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        values = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
        # as Triton does with tensors that begin at multiples of 16 bytes
        whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if types[n][0] == "*"}
        made = compile(ASTSource(kernel, types, values, whole),
                       target=GPUTarget("cuda", architecture, 32), options=options)
        [cubin] = [path for n, path in made.metadata_group.items() if n.endswith(".cubin")]
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        text = subprocess.check_output(command, text=True)
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir := made.asm["ttgir"], re.M))
        print(name, kernel.__name__, architecture, made.metadata.shared,
              *[re.search(f"{n}:([0-9]+)", text)[1] for n in ("REG", "STACK", "LOCAL")],
              *[len(re.findall(n, made.asm["ptx"])) for n in ("mma(?:.sync|_async)", "cp.async.c",
                                                             "griddep")],
              len({*re.findall("tt.dot [^,]+, [^,]+, (%[^ ,]+)", ttir := made.asm["ttir"])}
                  - {*re.findall(r"(%\S+) = arith.constant dense<0.0", ttir)}),
              # the order of sums over a tile
              crc32(repr(sorted({layouts[n] for n in re.findall(REDUCED, ttgir)})).encode()))
"""


@pytest.mark.nightly
def test_the_kernels_compile_for_the_gpus_that_have_bfloat16() -> None:
    """The interpreter takes what the compiler refuses. Compiling needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, "80", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) == 2 * (2 * 7 + 14 + 3)
    orders: dict[tuple[str, ...], set[str]] = {}
    for dtype, kernel, architecture, *numbers, order in made:
        shared, registers, stack, local, multiplied, copied, dependent, begun = map(int, numbers)
        if kernel in ("attention_kernel", "add_norm_kernel"):
            orders.setdefault((kernel, dtype, architecture), set()).add(order)
        most = 255 if kernel == "tiles_kernel" else 180
        assert registers <= most and shared <= 99 * 1024, "what a program may use on an L4"
        assert local == stack == 0, "spills"
        if kernel in ("attention_kernel", "few_kernel", "tiles_kernel"):
            assert bool(multiplied) == (dtype == "bf16"), "by tensor cores"
        assert copied or kernel not in ("attention_kernel", "tiles_kernel")
        overlaps = {"attention_kernel": 2, "few_kernel": 2, "add_norm_kernel": 2, "tiles_kernel": 1}
        assert dependent == (overlaps.get(kernel, 0) if architecture == "90" else 0)
        assert begun == 0 or kernel != "few_kernel", "a piece is added and not begun with"
    alike = [len(each) for each in orders.values()]
    assert alike == [1] * 8, "alone and shared, whole and in pieces: the same bits"


TINY = Shape(n_layer=1, n_head=1, n_embd=16, n_ctx=32, vocab_size=300)


@pytest.fixture(scope="module")
def tiny() -> GPT2:
    return enliven(load_model(TINY, None, seed=3, dtype=torch.float32, device="cpu"))


def requests(penalty: float = 0.0) -> list[Inference]:
    rng = random.Random(1)
    inferences = []
    for i, (n_prompt, n_tokens) in enumerate([(3, 4), (21, 2), (1, 6)]):
        prompt = [rng.randrange(N_VOCAB) for _ in range(n_prompt)]
        how = Sampling(temperature=i / 2, seed=i, presence_penalty=penalty * (i > 0))
        inferences.append(Inference(prompt, n_tokens, how))
    return inferences


class Replaying:
    """In the place of graphs.Capture: the recorded pass is the Python of the capture, which knows
    nothing of later iterations; as those of graphs its logits have one place, which the next replay
    overwrites.
    """

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self._logits: torch.Tensor | None = None

    def __call__(self, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        first = forward()
        if self._logits is None:  # the largest comes first
            self._logits = first.clone()

        def replay() -> torch.Tensor:
            assert self._logits is not None
            self.replayed.append(len(first))
            return self._logits[: len(first)].copy_(forward())

        return replay


@pytest.mark.parametrize(
    ("kind", "ours"),  # ours: the sampler is in the pass, not after it
    nightly_but(
        [(AsynchronousManager, True), (BatchingManager, False)],
        itertools.product((AsynchronousManager, BatchingManager), (False, True)),
    ),
)
def test_a_captured_pass_takes_sampled_ids(
    kind: type[BatchingManager], ours: bool, tiny: GPT2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that penalties change are drawn after it."""
    monkeypatch.setattr(paged_attention, "KEYS", 8)  # so that rows get long enough to be shared
    sampled = SampledIds(16, "cpu", triton=ours) if kind is AsynchronousManager else None
    attention = TritonAttention(KVCache(TINY, 15, 4, torch.float32, "cpu"), 16, 32)
    sampler, drawn, replaying = sample_on_gpu if ours else sample, list[int](), Replaying()
    engine = CachedGenerator(tiny, N_VOCAB, attention, sampler, 16, sampled)

    def after(logits: torch.Tensor, draws: Draws, n_vocab: int) -> torch.Tensor:
        drawn.append(len(draws))
        return sampler(logits, draws, n_vocab)

    engine.sample = after
    engine.capture([3, 1], replaying)
    limits: dict[str, Any] = {"n_blocks": 15, "max_batch_size": 3, "token_budget": 6}
    for penalty in (0.0, 1.5):
        drawn.clear()
        given, expected = requests(penalty), requests(penalty)
        texts, _ = served(kind, Dynamic(), given, engine, **limits)
        assert texts == serve(NoBatching(), Oracle(tiny, N_VOCAB), expected)
        assert bool(drawn) == (not ours or penalty > 0)
    assert {*replaying.replayed} == {1, 3}


def test_sampling_leaves_the_ids_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tensor is read the host waits for its GPU."""
    reads: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return real(*args, **kwargs)

        return read

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    samplings = [Sampling(), Sampling(1.0), Sampling(0.5, top_k=3), Sampling(2.0, top_p=0.5)]
    samplings.append(Sampling(1.0, 9, 0.9))
    ids = sample(torch.randn(5, 300), [(how, 1) for how in samplings], 257)
    assert len(ids) == 5 and not reads


def gpu_config(**settings: Any) -> Config:
    """As the launcher builds it where there is a GPU."""
    given = {"model": "gpt2-medium", "weights": "random", "device": "cuda"}
    return build("dynamic", given | settings, {})


def test_the_pool_is_what_memory_leaves_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    config = gpu_config(kv_cache="50%")
    block = 16 * 2 * 24 * 1024 * 2  # tokens × keys and values × layers × width × bytes
    tried: list[int] = []

    def fitting(free_gb: int, total_gb: int) -> int:
        memory = free_gb * 10**9, total_gb * 10**9
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: memory)
        return fitting_blocks(config, tried.append)

    assert fitting(15, 20) == 64 + 5 * 10**9 // block < config.n_blocks == 256 * 64
    assert tried == [64], "one request of 1,024 tokens"
    assert fitting(75, 80) == config.n_blocks, "as many as the rows can use"
    message = r"1\.00 GB more than 50% of this GPU's 20\.0 GB; lower --max-batch-size"
    with pytest.raises(OutOfMemory, match=message):
        fitting(9, 20)


def run_out(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_names_settings(tiny: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(TINY, 4, 4, torch.float32, "cpu")
    generator = CachedGenerator(tiny, N_VOCAB, PlainAttention(cache), sample, 40)
    monkeypatch.setattr(generator, "sample", run_out)
    message = "does not hold an iteration of 1 rows; lower --token-budget, --max-batch-size or "
    with pytest.raises(OutOfMemory, match=message):
        generator.generate(Iteration([row(0, 1, [0])], 1, 0, 1))
    with pytest.raises(torch.AcceleratorError, match="illegal"), memory_for("anything"):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    monkeypatch.setattr(assembly, "load_model", run_out)
    message = "does not hold gpt2-medium and an iteration of 256 rows; lower --token-budget"
    with pytest.raises(OutOfMemory, match=message):
        load_generator(gpu_config(), None, 257)


def test_a_gpu_loads_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: GPT2) -> None:
    """All that load_generator does there, but for CUDA's own calls."""
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_ctx": 32, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    monkeypatch.setattr(auto, "gpu_is_usable", lambda: True)
    # a budget of three of the longest prompts, in which the pool of the trial holds one
    settings = {"max_batch_size": 7, "token_budget": 93, "decoder_batch_sizes": "7,3,1"}
    settings |= {"block_size": 4, "dtype": "float32", "weights": "random", "tokenizer": "bytes"}
    settings |= {"model": str(tmp_path), "draft": f"model:{tmp_path}", "speculate": 4}
    config = gpu_config(**settings)
    config = config.model_copy(update={"device": "cpu"})
    captures = [Replaying() for _ in range(3)]
    monkeypatch.setattr(assembly, "Capture", iter(captures).__next__)
    room = 0.1 * 10**9 + 7 * config.block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (room, 10**9))
    monkeypatch.setattr(assembly, "load_model", lambda *_: copy.deepcopy(tiny))
    generator = load_generator(config, None, N_VOCAB)
    assert isinstance(generator, CachedGenerator)
    assert isinstance(generator.model.ln_f, TritonAddNorm)
    assert generator.n_blocks == 8 + 7, "one request of 32 tokens, and what remains"
    gc.collect()
    engines = sum(type(thing) is CachedGenerator for thing in gc.get_objects())
    assert engines == 2, "the trial is gone, and there is the draft model's"
    expected = serve(NoBatching(), Oracle(tiny, N_VOCAB), requests())
    limits: dict[str, Any] = {"n_blocks": 15, "max_batch_size": 3, "token_budget": 6}
    asks, drafter = requests(), generator.drafter
    for policy, limits["speculate"] in ((Static(), 0), (Dynamic(), 2)):
        captures[2].replayed.clear()
        asked = requests()
        generator.drafter = Guesses(asked, expected)
        served = serve(policy, generator, asked, **limits, decoder_batch_sizes=[1, 3])
        assert served == expected
        decodes = {1, 3, 7} if limits["speculate"] == 0 else {3, 7}
        assert {*captures[2].replayed} == decodes, "decodes of two sizes, and some with a prompt"
    assert drafter is not None
    for each, text in zip(asks, expected):
        each.tokens = text[:1]
    proposed = drafter.propose([(each, len(text) - 1) for each, text in zip(asks, expected)])
    assert proposed == [text[1:] for text in expected] and captures[0].replayed
