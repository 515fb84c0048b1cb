"""The model in five launches a layer, by generate/kernels/products.py. GPU.

    norm and c_attn · attention · c_proj and addition · norm, c_fc and gelu · c_proj and addition

By its modules, whose products are cuBLAS's, a layer takes eight (generate/norms.py).
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch import Tensor

from model import GPT2, Attend, Linear


class FusedGPT2(GPT2):
    """The model of passes of at most `most` tokens, with the modules of another one, which also
    compute longer passes. Their weights are laid out anew, columns one after another.
    """

    def __init__(self, model: GPT2, most: float):
        from generate.kernels.products import product

        nn.Module.__init__(self)
        self.__dict__.update(model.__dict__)  # shared, not copied
        self._product, self._most = product, most
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight.data = module.weight.data.T.contiguous().T

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, sample: Tensor) -> Tensor:
        """See GPT2.forward."""
        if len(ids) > self._most:
            return super().forward(ids, positions, attend, sample)
        product, blocks = self._product, list[Any](self.h)
        x = self.wte(ids) + self.wpe(positions)  # [T, E]
        for layer, block in enumerate(blocks):
            attn, mlp = block.attn, block.mlp
            qkv = product(x, *_of(attn.c_attn), norm=self._norm(block.ln_1))
            y = attend(layer, qkv.view(len(x), 3, self.shape.n_head, -1))  # [T, H, D]
            x = product(y.reshape(x.shape), *_of(attn.c_proj), add=x)
            y = product(x, *_of(mlp.c_fc), norm=self._norm(block.ln_2), gelu=True)  # [T, 4 E]
            x = product(y, *_of(mlp.c_proj), add=x)
        return product(x[sample], self.wte.weight.T, norm=self._norm(self.ln_f))  # [N, V]

    def _norm(self, norm: Any) -> tuple[Tensor, Tensor, float]:
        return norm.weight, norm.bias, self.shape.layer_norm_epsilon


def _of(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias
