"""Adapters (LoRA, Hu et al. 2021): read from PEFT's files, kept in host memory, and computed for
rows with different ones in one batch (Punica, Chen et al. 2023).

A linear layer is computed for the tokens of all rows together; each token then gets scale · B A x
of its row's adapter. Three ways, one result but for rounding:

    plain     PyTorch's products, once for tokens of one adapter that lie side by side; any device
    C++       generate/kernels/lora.h, inside the layers of kernels/linear.cpp; CPU
    Triton    generate/kernels/lora.py, called once a layer; GPU
"""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from config.shapes import LARGEST_RANK, Shape
from generate import kernels
from generate.buffers import Buffer
from generate.cached import CachedGenerator
from generate.linear import INPUTS, PackedLinear
from generate.weights import LARGEST_WEIGHT, WeightsUnavailable, expected_tensors
from model import GPT2, Module
from scheduling.inference import Iteration, Row

# Settings of PEFT with which an adapter is more than its tensors, and the values that are served:
# PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base weights, and an activated LoRA changes no
# token before its invocation.
ONLY: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
    "alora_invocation_tokens": (None,),
}


class AdapterError(WeightsUnavailable, ValueError):
    """An adapter that cannot be served; the message names the file, what is wrong, and the fix."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """tensors: A, [rank, in], and B, [out, rank], of each layer that it changes, by its name."""

    name: str
    rank: int
    scale: float
    tensors: dict[str, tuple[Tensor, Tensor]]


def layers(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return (inputs, outputs) of the layers that adapters can change, by their names."""
    sizes = {name.removesuffix(".weight"): size for name, size in expected_tensors(shape).items()}
    return {name: size for name, size in sizes.items() if ".c_" in name and len(size) == 2}


def random_adapter(name: str, rank: int, seed: int, shape: Shape) -> Adapter:
    """Make a seeded adapter that adds to a layer's outputs as much as a random layer has."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        layer: (
            torch.randn(rank, n_in, generator=rng) * n_in**-0.5,
            torch.randn(n_out, rank, generator=rng) * rank**-0.5,
        )
        for layer, (n_in, n_out) in layers(shape).items()
    }
    return Adapter(name, rank, 1.0, tensors)


def read_adapter(name: str, folder: str | Path, shape: Shape) -> Adapter:
    """Read what PEFT's save_pretrained wrote of a GPT-2 of this shape. Raises AdapterError."""
    path, settings = Path(folder, "adapter_model.safetensors"), Path(folder, "adapter_config.json")
    try:
        if not (path.is_file() and settings.is_file()):  # a pipe or a device may have no end
            raise FileNotFoundError(f"{path.name} or {settings.name}")
        config = json.loads(settings.read_text("utf-8"))
        rank, alpha, several = config["r"], float(config["lora_alpha"]), config.get("alpha_pattern")
        saved = {
            key.removeprefix("base_model.model.").removeprefix("transformer."): tensor.float()
            for key, tensor in load_file(path).items()
        }
    except Exception as error:  # files may hold anything
        raise AdapterError(
            f"{folder} has no adapter that can be read ({error!r:.200}); save it with PEFT's "
            "save_pretrained()"
        ) from None
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK or several:
        raise AdapterError(
            f"{folder} has r {rank!r:.50} and alpha_pattern {several!r:.50}; train the adapter "
            f"with a rank of 1 to {LARGEST_RANK} and one lora_alpha"
        )
    for field, offered in ONLY.items():
        if config.get(field, offered[0]) not in offered:
            raise AdapterError(
                f"{settings} says {field} {config[field]!r:.50}, with which an adapter is more "
                "than its tensors; train it without, or convert PiSSA and OLoRA by "
                "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=…)"
            )
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = {}
    for layer, (n_in, n_out) in layers(shape).items():
        names = [f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]
        if saved.keys().isdisjoint(names):
            continue
        for each, size in zip(names, [(rank, n_in), (n_out, rank)]):
            actual = tuple(saved[each].shape) if each in saved else "missing"
            if actual != size:
                raise AdapterError(
                    f"{path}: {each} is {actual}, and rank {rank} of this model wants {size}; "
                    "choose the --model that the adapter was trained on, or train it without "
                    "rank_pattern"
                )
        a, b = map(saved.pop, names)
        # a comparison with NaN is false
        if not all(part.abs().max() <= LARGEST_WEIGHT for part in (a, scale * b)):
            raise AdapterError(
                f"{path}: {names[0]} or {names[1]} × {scale:g} has values that are no numbers or "
                f"beyond {LARGEST_WEIGHT:g}; train the adapter with a lower learning rate"
            )
        if layer.endswith("c_attn"):  # as generate/checkpoint.py scales queries
            b[: shape.n_embd] *= shape.query_factor(int(layer.split(".")[1]))
        tensors[layer] = a, b
    if saved or not tensors:
        raise AdapterError(
            f"{path} has {next(iter(saved), 'no tensors')}, and only lora_A and lora_B of c_attn, "
            f"c_proj and c_fc in {shape.n_layer} layers can be served; train the adapter with "
            "these target_modules, without biases, DoRA and modules_to_save"
        )
    return Adapter(name, rank, scale, tensors)


class AdaptedLinear(Module):
    """A layer and what `add(x, y)` adds to its outputs in place."""

    def __init__(self, linear: nn.Module, add: Callable[[Tensor, Tensor], None]):
        super().__init__()
        self._linear, self._add = linear, add

    def forward(self, x: Tensor) -> Tensor:
        y = self._linear(x)
        self._add(x, y)
        return y


class AdapterStore:
    """The adapters of a model, whose layers it changes: all that are known, in host memory, and
    slots with those that rows can have.

    An adapter lies in a slot as it lies in host memory, so that loading it is one copy: of each
    layer A, [rank, inputs], and scale · B, [panels, rank, panel], float32. Inputs and
    outputs are filled up with zeros as those of packed layers; where layers are not packed a panel
    is one output. max_tokens: of an iteration at most.
    """

    def __init__(self, model: GPT2, n_slots: int, max_tokens: int, triton: bool = False):
        self._sizes = layers(model.shape)
        self._packed = isinstance(model.get_submodule(next(iter(self._sizes))), PackedLinear)
        self._panel = kernels.load().panel_size() if self._packed else 1
        self._known: dict[str, Tensor] = {}
        self._slots = {"": -1}
        whole = [(_whole(i, INPUTS), _whole(o, self._panel)) for i, o in self._sizes.values()]
        self._width, device = sum(map(sum, whole)), model.wte.weight.device
        # touched when it is written, and only up to an adapter's rank
        self._memory = torch.empty(n_slots, LARGEST_RANK * self._width, device=device)
        self._ranks = torch.zeros(n_slots, dtype=torch.int32, device=device)
        self._max_tokens = self._longest = max_tokens
        self._buffer = Buffer(4 * 4 * max_tokens, device)
        self._low = torch.empty(max_tokens if self._packed else 0, LARGEST_RANK)
        add = self._add
        if triton:
            import generate.kernels.lora as on_gpu

            self._longest, add = on_gpu.TOKENS, partial(self._launch, on_gpu.add)
        self._placed: array[int] | None = None  # slots of the tokens that were noted last
        self.place([])
        tensors = self._memory, self._noted, self._ranks, self._low
        addresses = [tensor.data_ptr() for tensor in tensors]
        offset = 0
        for name, (inputs, outputs) in zip(self._sizes, whole):
            linear, (parent, _, own) = model.get_submodule(name), name.rpartition(".")
            if isinstance(linear, PackedLinear):
                lora = kernels.Lora(*addresses, self._memory.stride(0), offset)
                linear.struct.lora = ctypes.pointer(lora)
            else:
                adapted = AdaptedLinear(linear, partial(add, offset, inputs))
                setattr(model.get_submodule(parent), own, adapted)
            offset += inputs + outputs

    def add(self, adapter: Adapter) -> None:
        """Keep an adapter for `load`. What a slot has of the same name stays until then."""
        rank, scale = adapter.rank, adapter.scale
        parts = []
        for name, (n_in, n_out) in self._sizes.items():
            none = torch.zeros(rank, n_in), torch.zeros(n_out, rank)
            a, b = adapter.tensors.get(name, none)
            b = F.pad(scale * b, (0, 0, 0, -n_out % self._panel))
            parts.append(F.pad(a, (0, -n_in % INPUTS)))
            parts.append(b.unflatten(0, (-1, self._panel)).transpose(1, 2))
        packed = torch.cat([part.flatten() for part in parts])
        self._known[adapter.name] = packed.pin_memory() if self._memory.is_cuda else packed

    def remove(self, name: str) -> None:
        """Forget an adapter; a slot that has it keeps it."""
        del self._known[name]

    def load(self, slot: int, name: str) -> None:
        """Copy an adapter into a slot, over the one that is there."""
        packed = self._known.get(name)
        if packed is None:  # removed since the iteration was planned: its rows were cancelled
            packed = torch.zeros(self._width)
        self._slots = {each: at for each, at in self._slots.items() if at != slot} | {name: slot}
        self._memory[slot, : len(packed)].copy_(packed, non_blocking=True)
        self._ranks[slot] = len(packed) // self._width

    def place(self, rows: Sequence[Row]) -> None:
        """Note the slots of the tokens that are computed next: `rows`, and padding after them."""
        slots = array("i")
        for row in rows:
            slot = -1 if row.idle else self._slots[row.inference.adapter]
            slots.extend([slot] * row.n_tokens)
        if slots == self._placed:
            return
        segments, end = list[tuple[int, int, int, int]](), 0  # first token, tokens, slot, none
        for slot, same in groupby(slots):
            first, end = end, end + sum(1 for _ in same)
            for at in range(first, end if slot >= 0 else first, self._longest):
                segments.append((at, min(self._longest, end - at), slot, 0))
        noted = slots if self._packed else array("i", chain.from_iterable(segments))
        size, rest = (1, -1) if self._packed else (4, 0)
        noted.extend([rest] * (size * self._max_tokens - len(noted)))
        with self._buffer as put:
            self._noted = put(noted)
        self._segments, self._placed = segments, slots[:end]

    def _add(self, offset: int, width: int, x: Tensor, y: Tensor) -> None:
        for first, n, slot, _ in self._segments:
            rank = int(self._ranks[slot])
            part = self._memory[slot, rank * offset :]
            a = part[: rank * width].view(rank, width)[:, : x.shape[1]]
            b = part[rank * width :][: rank * y.shape[1]].view(-1, rank)
            tokens = slice(first, first + n)
            y[tokens] = y[tokens] + x[tokens].float() @ a.T @ b.T

    def _launch(
        self, add: Callable[..., None], offset: int, width: int, x: Tensor, y: Tensor
    ) -> None:
        # a captured launch has a tile for each token
        n_tiles = len(self._segments) or len(x)
        add(x, y, self._memory, self._noted, n_tiles, self._ranks, offset, width)


class AdaptedGenerator(CachedGenerator):
    """The engine with adapters, which an iteration's `loads` put into slots."""

    def __init__(self, adapters: AdapterStore, *parts: Any):
        super().__init__(*parts)
        self.adapters = adapters

    def ids(self, iteration: Iteration) -> Tensor:
        for slot, name in iteration.loads:
            self.adapters.load(slot, name)
        return super().ids(iteration)

    def logits(self, rows: Sequence[Row], padding: int = 0, every: bool = False) -> Tensor:
        self.adapters.place(rows)
        return super().logits(rows, padding, every)


def _whole(n: int, each: int) -> int:
    return n + -n % each
