"""Where the C++ kernels find torch's threads, and that `auto` takes them only where serving can
load them.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import config
import kernels
from generate.attention import KernelAttention
from generate.linear import KernelLinear
from model import KVCache
from scheduling.inference import Inference, Row
from shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
MAPPED = """
from pathlib import Path
def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    names = ("libgomp", "libiomp", "libomp")
    return sorted(path for path in paths if Path(path).name.startswith(names))
"""


@pytest.fixture
def runtime() -> Path:
    """The OpenMP runtime beside torch's libraries, or wherever this process has it from."""
    return Path(kernels._openmp()[0]).resolve()


@pytest.fixture
def not_loaded() -> Iterator[None]:
    kernels.load.cache_clear()
    yield
    kernels.load.cache_clear()


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", MAPPED + program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchs_openmp_is_found_in_a_folder_with_a_space_before_torch_is_imported(
    tmp_path: Path, runtime: Path
) -> None:
    """The paths in /proc/self/maps were split at spaces, and the kernels then lacked every symbol
    of OpenMP.
    """
    copy = tmp_path / "an environment" / "torch" / "lib" / runtime.name
    copy.parent.mkdir(parents=True)
    shutil.copy(runtime, copy)
    copy.parents[1].joinpath("__init__.py").write_text(
        "raise AssertionError('the launcher must not import torch')"
    )
    said = run(
        f"import sys, kernels; sys.path.insert(0, {str(copy.parents[2])!r}); "
        f"print(kernels.why_unavailable(), *mapped())"
    )
    assert said == f"None {copy}"


def test_an_openmp_that_is_already_mapped_is_found_in_a_folder_with_a_space(
    tmp_path: Path, runtime: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(runtime, folder / runtime.name)
    said = run(
        "import ctypes, importlib.util, kernels; importlib.util.find_spec = lambda name: None; "
        f"ctypes.CDLL({str(folder / runtime.name)!r}); kernels.load(); print(*mapped())"
    )
    assert said == str(folder / runtime.name)


def test_kernels_that_were_loaded_first_and_torch_share_one_openmp() -> None:
    said = run(
        "import kernels; kernels.load(); import torch; from generate.linear import KernelLinear; "
        "torch.set_num_threads(2); "
        "KernelLinear(torch.ones(256, 768), None)(torch.ones(64, 256) @ torch.ones(256, 256)); "
        "print(len(mapped()))"
    )
    assert said == "1"


def test_kernels_that_cannot_be_loaded_are_not_chosen_and_a_warning_says_so(
    not_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` took them wherever they could be compiled, and the server then ended when it loaded
    them.
    """
    monkeypatch.setattr(kernels, "_openmp", lambda: ["/nowhere/libgomp.so.1"])
    found = config.build("dynamic", {"model": "demo"}, {})
    assert (found.attention, found.linear, found.sampler) == ("plain", "onednn", "plain")
    assert found.norms == "plain"
    assert any(
        "cannot be loaded beside torch's OpenMP (/nowhere/libgomp.so.1" in warning
        for warning in found.warnings()
    )
    with pytest.raises(
        config.ConfigError, match=r"linear kernel cannot be used here: .*reinstall torch"
    ):
        config.build("dynamic", {"model": "demo", "linear": "kernel"}, {})


def test_a_compiler_may_lie_in_a_folder_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "my tools" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'called' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    for named in (str(compiler), f"'{compiler}' -O1"):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(kernels.KernelUnavailable, match="failed: called"):
            kernels.build.__wrapped__()
    for named, said in (
        ("'c++", "is no command .* correct or unset it"),
        ("no-such c++", "install g\\+\\+"),
    ):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(kernels.KernelUnavailable, match=said):
            kernels.build.__wrapped__()


def test_a_packed_layer_reads_its_input_by_its_strides() -> None:
    layer, wide = KernelLinear(torch.randn(48, 64), torch.randn(64)), torch.randn(48, 30)
    for x in (
        wide.T,
        torch.randn(30, 96)[:, ::2],
        torch.randn(60, 48)[::2],
        torch.randn(1, 48).expand(30, 48),
    ):
        assert not x.is_contiguous() and torch.equal(
            layer(x), layer(x.clone(memory_format=torch.contiguous_format))
        )


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_the_attention_kernel_reads_its_input_by_its_strides(order: tuple[int, ...]) -> None:
    shape = Shape(n_layer=1, n_head=3, n_embd=48)
    qkv = torch.randn(20, 3, 3, 16)
    strided = qkv.permute(order).contiguous().permute(*[order.index(i) for i in range(4)])
    rows = [Row(Inference([0] * 20, 1), 0, 20, [1, 0], True, False)]
    found = [
        KernelAttention(KVCache(shape, 2, 16, torch.float32, "cpu")).prepare(rows)(0, x)
        for x in (qkv, strided)
    ]
    assert not strided.is_contiguous() and torch.equal(*found)


def test_the_launcher_imports_no_torch_to_try_the_kernels() -> None:
    assert importlib.util.find_spec("torch") is not None
    said = run(
        "import sys, config; c = config.build('dynamic', {'model': 'demo'}, {}); "
        "print(c.attention, 'torch' in sys.modules)"
    )
    assert said == "kernel False"
