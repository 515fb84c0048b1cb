from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from generate import kernels
from tests.counts import nightly_but
from tests.oracle import model as model  # a fixture

OWN = kernels.FLAGS
try:
    with open("/proc/cpuinfo") as file:
        FLAGS = {*next((line for line in file if line.startswith("flags")), "").split()}
except OSError:
    FLAGS = set()
# of each build the compiler's flags, and what this processor must have to run it
BUILDS: dict[str, tuple[list[str], str]] = {
    "this processor": ([], ""),
    "AVX512-BF16": (["-march=cooperlake"], "avx512_bf16"),
    "AVX-512": (["-march=skylake-avx512"], "avx512dq"),
    "AVX2": (["-march=haswell"], "avx2"),
    "AVX, no fused multiply-add": (["-march=ivybridge"], "avx"),
    "AMX emulated": (["-DEMULATE_TILES"], "avx512dq"),
    "AMX refused": (["-DEMULATE_TILES=0"], "avx512dq"),
}
FUSED = [name for name in BUILDS if name != "AVX, no fused multiply-add"]
# which add bfloat16's products in the order of tiles
TILED = {"AMX emulated", *(["this processor"] if "amx_bf16" in FLAGS else [])}


@contextmanager
def built_for(name: str) -> Iterator[None]:
    """Layers that are made meanwhile compute as on another processor."""
    flags, needed = BUILDS[name]
    if needed and needed not in FLAGS:
        pytest.skip(f"this processor has no {needed}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", [*OWN, *flags])
        kernels.build.cache_clear()
        kernels.load.cache_clear()
        try:
            yield
        finally:
            kernels.build.cache_clear()
            kernels.load.cache_clear()


@pytest.fixture(params=nightly_but(["this processor"], BUILDS))
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with built_for(request.param):
        yield request.param


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter adds a product's terms one after another to the sum that it is given, as
    tensor cores do: the BLAS that it calls has other kernels for the last rows.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, given: Any, *how: Any) -> Any:
        total = given.data.copy()
        for k in range(a.data.shape[-1]):
            total += a.data[..., k, None] * b.data[..., k, None, :]
        return TensorHandle(total, given.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
