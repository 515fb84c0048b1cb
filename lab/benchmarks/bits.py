"""Whether products and attention have the same bits for any number of tokens on this machine, on
which it depends that a request's text is the same whatever is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from config.config import Config
from config.shapes import Shape
from generate.attention import Attention, KernelAttention, TritonAttention
from generate.checkpoint import load_model
from generate.linear import PackedLinear, Sums, TritonLinear, pack
from generate.norms import TritonAddNorm
from lab.benchmarks.offline import decode_rows
from model import GPT2, KVCache
from scheduling.inference import Inference, Row
from scheduling.sampling import Sampling

# tokens of which a product has the same bits, around the limits of tiles and of a pass of rows
COUNTS = (1, 2, 5, 6, 7, 13, 16, 17, 32, 33, 64, 96, 97, 128, 256, 512, 1024, 2048)
MOST_ROWS, BLOCK_SIZE = 256, 16


@torch.inference_mode()
def other_bits(config: Config) -> dict[str, list[int]]:
    """Return for each product of a layer and of the LM head, and for attention, the COUNTS of
    tokens with other bits than the most: with `--linear triton` on a GPU; on a CPU with `--linear
    kernel` or `int8`, where also a prompt, and a completion that is recomputed, must have the same
    bits in chunks of each count as whole.
    """
    shape = replace(config.shape, n_layer=1)  # layers are alike
    dtype = getattr(torch, config.dtype)
    model = load_model(shape, None, 0, dtype, config.device)
    pack(model, config.linear)
    generator = torch.Generator(config.device).manual_seed(0)
    found = dict(_of_products(model, generator))
    *_, most = [n for n in COUNTS if n <= MOST_ROWS]
    rows = decode_rows(most, shape.n_ctx // 2, BLOCK_SIZE, Sampling())
    n_blocks = most * len(rows[0].blocks)
    cache = KVCache(shape, n_blocks, BLOCK_SIZE, dtype, config.device)
    cache.layers[0].normal_(generator=generator)
    triton = config.linear == "triton"
    attention = TritonAttention(cache, most, shape.n_ctx) if triton else KernelAttention(cache)
    size = max(most, shape.n_ctx), 3, shape.n_head, shape.head_size
    qkv = torch.randn(size, generator=generator, device=config.device).to(dtype)
    # rows have half their context; few of them are shared by several programs of a GPU
    y = {n: attention.prepare(rows[:n])(0, qkv[:n]) for n in COUNTS if n <= most}
    found["attention"] = [n for n, of_rows in y.items() if not torch.equal(of_rows, y[most][:n])]
    if not triton:
        for name, n_prompt in (("prompts", shape.n_ctx), ("completions", 1)):
            inference = Inference(
                [0] * n_prompt, shape.n_ctx, tokens=[0] * (shape.n_ctx - n_prompt)
            )
            whole = _in_chunks(attention, cache, inference, qkv, shape, shape.n_ctx)
            found[f"attention of {name}"] = [
                n for n in COUNTS if n < shape.n_ctx
                and not torch.equal(_in_chunks(attention, cache, inference, qkv, shape, n), whole)
            ]  # fmt: skip
    return found


def _of_products(model: GPT2, generator: torch.Generator) -> Iterator[tuple[str, list[int]]]:
    norm = TritonAddNorm(cast(Any, model.ln_f))
    for name, layer in model.named_modules():
        if isinstance(layer, (PackedLinear, TritonLinear)):
            wte = model.wte.weight
            size = COUNTS[-1], layer.n_in
            x = torch.randn(size, generator=generator, device=wte.device).to(wte.dtype)
            each = {n: layer(x[-n:]) for n in COUNTS}
            for n, y in each.items():
                if isinstance(y, Sums):  # which an addition to nothing adds
                    each[n], _ = norm(x.new_zeros(n, y.pieces.shape[2]), y)
            yield name, [n for n in COUNTS if not torch.equal(each[n], each[COUNTS[-1]][-n:])]


def _in_chunks(
    attention: Attention, cache: KVCache, inference: Inference, qkv: Tensor, shape: Shape, size: int
) -> Tensor:
    """Return attention's results for all tokens of a request, computed `size` at a time."""
    blocks = list(range(-(-shape.n_ctx // cache.block_size)))
    found = []
    for start in range(0, shape.n_ctx, size):
        n = min(size, shape.n_ctx - start)
        row = Row(inference, start, n, blocks, samples=False, idle=False)
        found.append(attention.prepare([row])(0, qkv[start : start + n]))
    return torch.cat(found)
