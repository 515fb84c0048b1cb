"""The kernels as they are built for other processors, on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kernels

BUILDS = {
    "this processor": [],
    "AVX-512 without bfloat16 and VNNI": ["-mno-avx512bf16", "-mno-avx512vnni", "-mno-avxvnni"],
    "AVX2": ["-mno-avx512f", "-mno-avxvnni"],
    "AMX emulated": ["-DEMULATE_TILES"],
}


@contextmanager
def built_for(name: str) -> Iterator[None]:
    """Layers that are made meanwhile compute as on another processor. Skips where there is none."""
    flags = Path("/proc/cpuinfo").read_text()
    if BUILDS[name] and " avx2" not in flags:
        pytest.skip("other builds are of processors of this one's kind, x86-64 with AVX2")
    if name == "AMX emulated" and " avx512f" not in flags:
        pytest.skip("processors with AMX have AVX-512, whose panels its tiles fill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", [*kernels.FLAGS, *BUILDS[name]])
        kernels.build.cache_clear()
        kernels.load.cache_clear()
        try:
            yield
        finally:
            kernels.build.cache_clear()
            kernels.load.cache_clear()
