"""What happens where the C++ kernels cannot be built, or not be used; and what their threads wait
for.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import config
import kernels
from shapes import Shape


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
    monkeypatch.setattr(kernels, "_run", lambda command: Path(command[-1]).touch())
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


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    program = str(tmp_path_factory.mktemp("team") / "team")
    command = [compiler, "-std=c++17", "-fopenmp", f"-I{kernels.FOLDER}", "-x", "c++", "-"]
    subprocess.run([*command, "-o", program], input=TEAM, text=True, check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=20, check=True)
    return [int(number) for number in done.stdout.split()]


def test_threads_wait_for_work_and_never_for_a_thread_that_is_away(team: list[int]) -> None:
    """At a barrier of threads this never ends; beside a busy loop 520 tok/s of gpt2 became 19."""
    pieces, before_their_phase, without_it = team[:3]
    assert (pieces, before_their_phase, without_it) == (8000, 0, 1)


def test_the_team_is_one_thread_smaller_beside_a_busy_neighbour(team: list[int]) -> None:
    """It is whole at once again, but for the last pause, when the neighbour has gone."""
    a_little, all_the_time, alone, of_one = team[3:]
    assert a_little == 6000 and 6000 * 0.05 < all_the_time < 6000 * 0.15
    assert 6000 - 160 <= alone <= 6000 and of_one == 1
