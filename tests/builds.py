"""The kernels as they are built for other processors, on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import kernels

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
}
FUSED = [name for name in BUILDS if name != "AVX, no fused multiply-add"]
# which multiply bfloat16 by tiles, and add in another order than all others
TILED = {"AMX emulated"} | ({"this processor"} if "amx_bf16" in FLAGS else set())


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
