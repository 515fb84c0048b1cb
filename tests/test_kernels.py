"""The C++ kernels against PyTorch, on ragged batches and odd sizes; and what happens where they
cannot be built.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import config
import kernels
from generate.linear import KernelLinear, OneDNNLinear
from shapes import Shape

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02}  # of values around 1; bfloat16 keeps 8 bits
DTYPES = list(TOLERANCE)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sizes() -> list[tuple[int, int]]:
    return [(256, 768), (64, 64), (65, 1), (1, 63), (130, 257), (48, 144)]


@pytest.mark.parametrize("kind", [KernelLinear, OneDNNLinear])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), sizes())
def test_a_packed_layer_equals_the_plain_one(
    kind: type[KernelLinear] | type[OneDNNLinear],
    dtype: torch.dtype,
    n_in: int,
    n_out: int,
    threads: int,
) -> None:
    generator = torch.Generator().manual_seed(n_in)
    weight = (torch.randn(n_in, n_out, generator=generator) * n_in**-0.5).to(dtype)
    bias = torch.randn(n_out, generator=generator).to(dtype)
    plain, with_gelu, no_bias = (
        kind(weight, bias),
        kind(weight, bias, gelu=True),
        kind(weight, None),
    )
    for n_tokens in (0, 1, 2, 5, 6, 7, 12, 64, 300):
        x = torch.randn(n_tokens, n_in, generator=generator).to(dtype)
        exact = x.double() @ weight.double()
        for layer, expected in (
            (plain, exact + bias),
            (with_gelu, F.gelu(exact + bias, approximate="tanh")),
            (no_bias, exact),
        ):
            found = layer(x)
            assert found.shape == expected.shape and found.dtype == dtype
            assert torch.allclose(
                found.double(), expected, rtol=8e-3 if dtype == torch.bfloat16 else 0, atol=1e-5
            )


def test_gelu_stays_finite_for_values_of_any_size() -> None:
    x = torch.tensor([[-1e9], [-300.0], [-9.0], [-1.0], [0.0], [1.0], [9.0], [300.0], [1e9]])
    found = KernelLinear(torch.ones(1, 1), None, gelu=True)(x)
    assert torch.allclose(found, F.gelu(x, approximate="tanh"), atol=1e-6)


def test_a_tokens_result_does_not_depend_on_the_other_tokens() -> None:
    layer = KernelLinear(torch.randn(256, 768), torch.randn(768))
    x = torch.randn(70, 256)
    together = layer(x)
    assert all(
        torch.equal(layer(x[i : i + n].contiguous()), together[i : i + n])
        for i in range(0, 60, 7)
        for n in (1, 6, 9)
    )


# ---- building


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.build.cache_clear()
    kernels.load.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    kernels.build.cache_clear()
    kernels.load.cache_clear()


def test_the_kernels_are_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = kernels.build()
    assert library.is_file() and list(library.parent.iterdir()) == [library]
    kernels.build.cache_clear()  # as another process would
    monkeypatch.setattr(kernels, "_run", lambda command: pytest.fail("compiled again"))
    assert kernels.build() == library


def test_without_a_compiler_pytorchs_own_operations_serve_and_a_warning_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = config.build("dynamic", {"model": "demo"}, {})
    assert (found.attention, found.linear, found.sampler) == ("plain", "onednn", "plain")
    assert found.norms == "plain"
    assert any(
        "no C++ compiler 'no-such-compiler'; install g++" in warning for warning in found.warnings()
    )
    assert not config.build("dynamic", {"model": "fake"}, {}).warnings()
    for name in ("attention", "linear", "sampler", "norms"):
        with pytest.raises(
            config.ConfigError, match=f"{name} kernel cannot be used here: no C\\+\\+ compiler"
        ):
            config.build("dynamic", {"model": "demo", name: "kernel"}, {})


def test_a_compiler_that_fails_is_quoted(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(compiler)))
    assert kernels.why_unavailable() == f"{compiler} failed: unknown flag"


def test_a_cache_folder_that_cannot_be_written_is_a_reason(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "could not be built" in str(kernels.why_unavailable())


def test_kernels_asked_for_where_they_cannot_run_are_refused() -> None:
    wide = Shape(n_layer=1, n_head=1, n_embd=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.Config, "shape", wide)
        with pytest.raises(config.ConfigError, match="heads of at most 256; use --attention plain"):
            config.build("dynamic", {"model": "demo", "attention": "kernel"}, {})


def test_triton_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "cc")
    assert "apt install python3-dev" in str(kernels.why_no_triton(64))
    (tmp_path / "Python.h").touch()
    assert kernels.why_no_triton(64) is None and "heads of 80 are larger" in str(
        kernels.why_no_triton(80)
    )
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt install build-essential" in str(kernels.why_no_triton(64))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in str(kernels.why_no_triton(64))
