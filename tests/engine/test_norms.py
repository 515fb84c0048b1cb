"""The kernels of additions and norms equal PyTorch's, on odd sizes and values of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from generate.norms import KernelAddNorm
from model import AddNorm

# of values around 1; bfloat16: one step of its 8 bits between 2 and 4
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6}
DTYPES = list(TOLERANCE)


def plain_norm(width: int, dtype: torch.dtype) -> AddNorm:
    """A norm with weights that are all different."""
    norm = AddNorm(width, 1e-5).requires_grad_(False)
    norm.weight.normal_(1, 0.3, generator=torch.Generator().manual_seed(width))
    norm.bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(width + 1))
    return norm.to(dtype)


def two(n_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_rows)
    x, y = torch.randn(2, n_rows, width, generator=generator).to(dtype)
    return x, y


def check(norm: AddNorm, x: Tensor, y: Tensor) -> None:
    """The sum to the bit, and its norm as float64 has it."""
    total, normed = KernelAddNorm(norm)(x, y)
    assert torch.equal(total, x + y) and total.dtype == normed.dtype == x.dtype
    exact = AddNorm(norm.normalized_shape, norm.eps).requires_grad_(False).double()
    exact.load_state_dict(norm.state_dict())
    _, expected = exact((x + y).double(), torch.zeros(()))
    assert normed.shape == expected.shape
    # in parts of the largest value of each row
    wrong = (normed.double() - expected).abs() / expected.abs().amax(-1, keepdim=True).clamp(1)
    assert (wrong < TOLERANCE[x.dtype]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 15, 16, 17, 63, 100, 768, 1025])
def test_the_kernel_equals_pytorchs_addition_and_norm(
    dtype: torch.dtype, width: int, threads: int
) -> None:
    norm = plain_norm(width, dtype)
    for n_rows in (0, 1, 2, 3, 7, 64, 300):
        check(norm, *two(n_rows, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_are_read_where_they_lie_and_left_alone(dtype: torch.dtype) -> None:
    norm = plain_norm(48, dtype)
    x, y = two(10, 96, dtype)
    before = x.clone(), y.clone()
    check(norm, x[::2, 1::2], y[5:, :48])
    check(norm, x[:1].expand(7, 96)[:, :48], y.T[:48].T[:7])
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_any_size_are_normed(dtype: torch.dtype) -> None:
    """Also a small variance on a large mean, which sums of squares lose, and no variance at all."""
    norm, (x, y) = plain_norm(768, dtype), two(5, 768, dtype)
    for size in (0.0, 1e-30, 1e-4, 1e4, 1e15):
        check(norm, x * size, y * size)
    x, _ = two(3, 768, dtype)
    check(norm, torch.full_like(x, 256.0), (2 * x).round())
    for value in (0.0, 3.0, -1024.0):
        constant = torch.full((2, 768), value, dtype=dtype)
        assert torch.equal(KernelAddNorm(norm)(constant, constant)[1], norm.bias.expand(2, 768))


def test_values_that_are_no_numbers_stay_in_their_row() -> None:
    norm = KernelAddNorm(plain_norm(768, torch.float32))
    x, y = two(4, 768, torch.float32)
    before = norm(x, y)
    x[1, 5], x[2, 700] = torch.nan, torch.inf
    assert all(torch.equal(a[[0, 3]], b[[0, 3]]) for a, b in zip(norm(x, y), before))
