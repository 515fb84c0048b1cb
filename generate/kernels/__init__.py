"""Operations that PyTorch does too slowly: in C++ for CPUs, and in Triton for GPUs
(paged_attention.py, products.py, add_norm.py, lora.py, draw.py, known.py).

The C++ is built once, kept in the user's cache folder, and called by ctypes. Neither this module
nor the sources know torch, so that a build takes seconds; a call passes addresses, and other
threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from config.shapes import LARGEST_HEAD

FOLDER = Path(__file__).parent
# -ffast-math: without it the compiler may not turn sums and exp into vectors
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC"]
TIMEOUT_S = 120

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_FLOATS, _INT8 = ("float32", "bfloat16"), ("int8_float32", "int8_bfloat16")
# arguments of the functions that exist for several types, and the types at the end of their names
SIGNATURES = {
    ("linear", _FLOATS + _INT8): [_ADDRESS] * 3 + [_SIZE, _INT],
    ("add_norm", _FLOATS): [_ADDRESS] * 6 + [_SIZE] * 2 + [ctypes.c_float, _INT],
    ("paged_attention", _FLOATS + _INT8): [_ADDRESS] * 8 + [_SIZE] * 3 + [_INT] * 2,
    ("sample", _FLOATS): [_ADDRESS] + [_SIZE] * 3 + [_ADDRESS] * 2 + [_INT],
}


class Lora(ctypes.Structure):
    """Adapters of a linear layer as lora.h takes them."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("memory", "slots", "ranks", "low")),
        *((name, _SIZE) for name in ("stride", "offset")),
    ]


class Linear(ctypes.Structure):
    """A linear layer as linear.cpp takes it: addresses, sizes, whether a gelu follows, adapters."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("packed", "start", "scales", "bias")),
        *((name, _SIZE) for name in ("n_in", "n_out", "with_gelu")),
        ("lora", ctypes.POINTER(Lora)),
    ]


_LINEAR = ctypes.POINTER(Linear)


class Norm(ctypes.Structure):
    """A norm's addresses as forward.cpp takes them."""

    _fields_ = [("weight", _ADDRESS), ("bias", _ADDRESS)]


class Block(ctypes.Structure):
    """A block of the model as forward.cpp takes it. cache, scales: its keys and values."""

    _fields_ = [
        *((name, Norm) for name in ("ln_1", "ln_2")),
        *((name, _LINEAR) for name in ("c_attn", "attn_c_proj", "c_fc", "mlp_c_proj")),
        *((name, _ADDRESS) for name in ("cache", "scales")),
    ]


class ModelStruct(ctypes.Structure):
    """A GPT-2 as forward.cpp takes it, with the kernels of its types."""

    _fields_ = [
        *((name, _ADDRESS) for name in ("linear", "add_norm", "attention", "wte", "wpe")),
        ("h", ctypes.POINTER(Block)),
        ("ln_f", Norm),
        ("lm_head", _LINEAR),
        *((name, _SIZE) for name in ("n_layer", "n_head", "n_vocab", "n_ctx")),
        *((name, _SIZE) for name in ("width", "element", "block_size")),
        ("epsilon", ctypes.c_float),
    ]


class KernelUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why, and what to do."""


@functools.cache
def build() -> Path:
    """Return the library, compiled unless it is there for such a processor. Raises
    KernelUnavailable.
    """
    if sys.platform != "linux":
        raise KernelUnavailable("the C++ kernels are built on Linux only")
    try:
        compiler = shlex.split(os.environ.get("CXX") or "c++")
    except ValueError as error:
        raise KernelUnavailable(f"CXX is no command ({error}); correct or unset it") from None
    sources = sorted(FOLDER.glob("*.cpp"))
    texts = [path.read_text("utf-8") for path in (*sources, *sorted(FOLDER.glob("*.h")))]
    key = "\0".join([*compiler, *FLAGS, *texts, _processor()])
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(caches, "effective-batching")
    library = cache / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            objects = {str(source): f"{folder}/{source.stem}.o" for source in sources}
            commands = [
                [*compiler, *FLAGS, "-c", source, "-o", object]
                for source, object in objects.items()
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))  # raises the first error
            linked = Path(folder, library.name)
            # not with an OpenMP runtime: see `load`
            _run([*compiler, "-shared", *objects.values(), "-o", str(linked)])
            linked.replace(library)  # whole or not at all: another process may build it, too
    except FileNotFoundError:
        raise KernelUnavailable(
            f"no C++ compiler {compiler[0]!r}; install g++, or name one in CXX"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise KernelUnavailable(f"{compiler[0]} failed: {lines[-1] if lines else error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"the C++ kernels could not be built ({error})") from None
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)


def why_unavailable() -> str | None:
    """Return why the kernels cannot be built and loaded here, or None if they can."""
    try:
        load()
    except KernelUnavailable as error:
        return str(error)
    return None


def why_no_triton(head_size: int) -> str | None:
    """Return why kernels in Triton, which needs a C compiler, cannot be used here; None if they
    can.
    """
    if head_size > LARGEST_HEAD["triton"]:
        return f"the model's heads of {head_size} are larger than {LARGEST_HEAD['triton']}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; on Debian and Ubuntu: apt install build-essential"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python's headers; on Debian and Ubuntu: apt install python3-dev"
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library, its functions declared as their sources document them. Raises
    KernelUnavailable.

    The threads are torch's: a second OpenMP runtime in the process would bring threads of its own,
    which wait for work by spinning and take the cores from torch's. torch need not be imported yet.
    """
    path = build()
    try:
        for runtime in _openmp():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(
            f"the C++ kernels cannot be loaded beside torch's OpenMP ({error}); reinstall torch"
        ) from None
    for (name, types), arguments in SIGNATURES.items():
        for dtype in types:
            declared = getattr(library, f"{name}_{dtype}")
            declared.argtypes, declared.restype = arguments, None
    library.forward.argtypes = [_ADDRESS] * 7 + [_SIZE] * 2 + [_ADDRESS, _INT]
    library.read_int64.argtypes = [_ADDRESS, _SIZE, _INT]
    library.read_int64.restype = _SIZE
    return library


def function(name: str, dtype: object) -> Any:
    """Return a function of the library for torch.float32 or torch.bfloat16. Raises
    KernelUnavailable.
    """
    return getattr(load(), f"{name}_{str(dtype).removeprefix('torch.')}")


def _openmp() -> list[str]:
    """Find torch's OpenMP runtime: its package's, else this process's, else the system's."""
    spec = importlib.util.find_spec("torch")
    roots = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    packaged = [
        str(file)
        for root in roots
        for file in (*root.glob("lib/lib*omp*"), *root.parent.glob("torch.libs/lib*omp*"))
    ]
    # the sixth field of a line is a path, which may hold spaces
    fields = [
        line.split(maxsplit=5)
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    ]
    mapped = {line[5] for line in fields if len(line) == 6}
    return _runtimes(packaged) or _runtimes(mapped) or ["libgomp.so.1"]


def _runtimes(paths: Iterable[str]) -> list[str]:
    return sorted(path for path in paths if re.fullmatch(r"lib[gi]?omp\d*[-.].*", Path(path).name))


def _processor() -> str:
    """Return what -march=native depends on: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
