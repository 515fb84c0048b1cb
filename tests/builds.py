"""The kernels as they are built for other processors, on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kernels

OWN = kernels.FLAGS
try:
    PROCESSOR = Path("/proc/cpuinfo").read_text()
except OSError:
    PROCESSOR = ""
AMX = " amx_bf16" in PROCESSOR
NO_AMX = ["-mno-amx-bf16", "-mno-amx-tile", "-mno-amx-int8"] if AMX else []
BUILDS = {
    "this processor": [],
    "AVX-512 without bfloat16 and VNNI": [
        *NO_AMX, "-mno-avx512bf16", "-mno-avx512vnni", "-mno-avxvnni"
    ],
    "AVX2": [*NO_AMX, "-mno-avx512f", "-mno-avxvnni"],
    "AMX emulated": ["-DEMULATE_TILES"],
} | ({"this processor without AMX": NO_AMX} if AMX else {})  # fmt: skip
# which multiply bfloat16 by tiles, and add in another order than all others
TILED = {"AMX emulated"} | ({"this processor"} if AMX else set())


@contextmanager
def built_for(name: str) -> Iterator[None]:
    """Layers that are made meanwhile compute as on another processor. Skips where there is none."""
    if BUILDS[name] and " avx2" not in PROCESSOR:
        pytest.skip("other builds are of processors of this one's kind, x86-64 with AVX2")
    if name == "AMX emulated" and " avx512f" not in PROCESSOR:
        pytest.skip("processors with AMX have AVX-512, whose panels its tiles fill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "FLAGS", [*OWN, *BUILDS[name]])
        kernels.build.cache_clear()
        kernels.load.cache_clear()
        try:
            yield
        finally:
            kernels.build.cache_clear()
            kernels.load.cache_clear()
