"""C++ kernels are built once, and `auto` takes them only where serving can load them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.settings import PARTS, ConfigError
from generate import kernels
from generate.auto import build, warnings
from tests.servers import ROOT

MAPPED = """
from pathlib import Path
def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    names = ("libgomp", "libiomp", "libomp")
    return sorted(path for path in paths if Path(path).name.startswith(names))
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.build.cache_clear()
    kernels.load.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    kernels.build.cache_clear()
    kernels.load.cache_clear()


def run(program: str) -> str:
    command = [sys.executable, "-c", MAPPED + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_kernels_are_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_run", lambda command: Path(command[-1]).touch())
    library = kernels.build()
    assert library.is_file() and list(library.parent.iterdir()) == [library]
    kernels.build.cache_clear()  # as another process would
    monkeypatch.setattr(kernels, "_run", lambda command: pytest.fail("compiled again"))
    assert kernels.build() == library


@pytest.mark.parametrize("lacking", ["a compiler", "an OpenMP"])
def test_without_kernels_pytorch_serves_and_a_warning_says_why(
    lacking: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` took all that could be compiled, and a server that could not load them ended."""
    reason = "no C++ compiler 'no-such-compiler'; install g++"
    if lacking == "a compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(kernels, "_openmp", lambda: ["/nowhere/libgomp.so.1"])
        reason = "cannot be loaded beside torch's OpenMP (/nowhere/libgomp.so.1"
    config = build("dynamic", {"model": "demo"}, {})
    parts = [config.attention, config.linear, config.norms, config.sampler]
    assert parts == ["plain"] * 4
    assert any(reason in warning for warning in warnings(config))
    assert not warnings(build("dynamic", {"model": "fake"}, {}))
    for name in PARTS:
        with pytest.raises(ConfigError, match=f"{name} kernel cannot be used here: ") as caught:
            build("dynamic", {"model": "demo", name: "kernel"}, {})
        assert reason in str(caught.value)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("CXX", "'{}/my tools/c++' -O1", "failed: unknown flag"),
    ("CXX", "'c++", "is no command .* correct or unset it"),
    ("CXX", "no-such c++", "install g\\+\\+"),
    ("XDG_CACHE_HOME", "{}/my tools/c++", "could not be built"),
])  # fmt: skip
def test_a_build_that_fails_is_quoted_and_its_tools_may_lie_in_a_folder_with_a_space(
    name: str, value: str, message: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = empty_cache / "my tools" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'unknown flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv(name, value.format(empty_cache))
    with pytest.raises(kernels.KernelUnavailable, match=message):
        kernels.build()


def test_triton_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "cc")
    assert "apt install python3-dev" in str(kernels.why_no_triton(64))
    (tmp_path / "Python.h").touch()
    assert kernels.why_no_triton(64) is None
    assert "heads of 80 are larger" in str(kernels.why_no_triton(80))
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt install build-essential" in str(kernels.why_no_triton(64))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in str(kernels.why_no_triton(64))


@pytest.mark.parametrize("program", [
    "import sys; sys.path.insert(0, {0!r})",  # torch's, before torch is imported
    "import ctypes, importlib.util; importlib.util.find_spec = lambda name: None; "
    "ctypes.CDLL({1!r})",  # one that is mapped already
])  # fmt: skip
def test_an_openmp_is_found_in_a_folder_with_a_space(program: str, tmp_path: Path) -> None:
    """Paths in /proc/self/maps were split at spaces, and kernels lacked OpenMP's symbols."""
    runtime = Path(kernels._openmp()[0]).resolve()
    copy = tmp_path / "an environment" / "torch" / "lib" / runtime.name
    copy.parent.mkdir(parents=True)
    shutil.copy(runtime, copy)
    copy.parents[1].joinpath("__init__.py").write_text("raise AssertionError('imports torch')")
    program = program.format(str(copy.parents[2]), str(copy))
    shown = "print(kernels._openmp(), kernels.why_unavailable(), *mapped())"
    printed = run(f"from generate import kernels; {program}; {shown}")
    assert printed == f"{[str(copy)]} None {copy}"


def test_the_launcher_imports_no_torch_and_the_kernels_share_its_openmp() -> None:
    printed = run(
        "import sys; from generate.auto import build; c = build('dynamic', {'model': 'demo'}, {}); "
        "print(c.attention, 'torch' in sys.modules); "
        "import torch; from generate.linear import KernelLinear; torch.set_num_threads(2); "
        "KernelLinear(torch.ones(256, 768), None)(torch.ones(64, 256) @ torch.ones(256, 256)); "
        "print(len(mapped()))"
    )
    assert printed.split() == ["kernel", "False", "1"]


# Thread 1 is away from the first 1,000 phases; five others take their pieces. Then three minutes of
# iterations on two threads: one waits a tenth of the time; all the time; not at all.
TEAM = """
#include "team.h"
#include <cstdio>

int main() {
    std::atomic<int64_t> pieces{0}, early{0}, without{0};
    std::atomic<bool> away{true};
    as_team(6, 0, [&](Member& me) {
        while (omp_get_thread_num() == 1 && pieces < 4000) usleep(1000);
        if (omp_get_thread_num() == 1) away = false;
        for (int64_t phase = 0; phase < 2000; phase++)
            me.share(4, [&](int64_t, auto following) {
                if (phase % 2) following();
                early += pieces < 4 * phase;
                without += away;
                pieces++;
            });
    });
    std::printf("%d %d %d", int(pieces), int(early), without >= 4000);
    Crew crew;
    int64_t now = 0;
    for (double waits : {0.1, 1.0, 0.0}) {
        int together = 0;
        for (int i = 0; i < 6000; i++) {
            const int n = crew.of(2);
            crew.learn(2, n == 2 ? int64_t(waits * 10e6) : 0, now += 10'000'000);
            together += n == 2;
        }
        std::printf(" %d", together);
    }
    std::printf(" %d", crew.of(1));
}
"""


def test_a_team_waits_for_no_absent_thread_and_is_smaller_beside_other_load(tmp_path: Path) -> None:
    """At a barrier of threads this never ends; beside a busy loop 520 tok/s of gpt2 became 19."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    program = str(tmp_path / "team")
    command = [compiler, "-std=c++17", "-fopenmp", f"-I{kernels.FOLDER}", "-x", "c++", "-"]
    subprocess.run([*command, "-o", program], input=TEAM, text=True, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=20, check=True)
    pieces, early, without, *together, of_one = (int(number) for number in done.stdout.split())
    assert (pieces, early, without) == (8000, 0, 1)
    a_little, all_the_time, alone = together
    assert a_little == 6000 and 6000 * 0.05 < all_the_time < 6000 * 0.15
    assert 6000 - 160 <= alone <= 6000, "whole again at once, but for the last pause"
    assert of_one == 1
