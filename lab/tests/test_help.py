"""What --help of studies and benchmarks shows, by the tests of the product's programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lab.benchmarks.harness import Benchmark
from lab.studies import __main__ as studies
from tests.config import test_help as product
from tests.config.test_help import Shown


def benchmark(argv: Sequence[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["", *argv])
        about = f"{'A sentence. ' * 20}\n\n    python -m lab.benchmarks.it {'[--own N] ' * 20}"
        Benchmark("it", about, {"--own": (1, "a number")}).configs()


@pytest.mark.parametrize(("parser", "words"), [
    (benchmark, "--help"), (benchmark, "--help all"),
    (studies.main, "--help"), (studies.main, "orders --help"),
])  # fmt: skip
def test_help_fits_a_width(
    parser: Callable[[list[str]], object],
    words: str,
    shown: Shown,
) -> None:
    product.test_help_fits_a_width(parser, words, shown)


def test_help_of_a_benchmark_shows_its_own_flags_and_all_on_demand(
    shown: Shown,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(product.PARSERS, "it", benchmark)
    product.test_help_shows_the_flags_most_used_and_all_on_demand("it", shown)
    product.test_an_error_of_usage_leads_to_help("it", "--own")
