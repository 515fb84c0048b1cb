"""What a study reads again, if it is odd: read, or refused in a sentence."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from config.reading import parse
from config.settings import ConfigError
from lab.studies.__main__ import load, result_of
from lab.studies.runner import FinishedRuns
from tests.config import test_reading as product
from tests.servers import ROOT

ORDERS = ROOT / "results" / "orders" / "orders.json.gz"


def from_folder(path: Path) -> Any:
    options = {"study": load("orders"), "source": path.parent, "only": []}
    return result_of(Namespace(**options))


READERS = {  # as the product's
    "orders.json": (
        from_folder, ConfigError,
        json.dumps({"cases": parse(gzip.decompress(ORDERS.read_bytes()))["cases"][:1]}),
    ),
    "orders.runs.jsonl": (
        lambda path: FinishedRuns(path, "code"), ConfigError,
        f'{{"code": "code", "run": ["{product.SEPARATORS[:3]}", 1, 0], "result": {{}}}}',
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", READERS)
def test_odd_files_and_values_are_read_or_refused_in_a_sentence(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "READERS", READERS)
    folder = tmp_path_factory.mktemp("odd")
    product.test_a_file_that_is_deep_huge_or_no_text_is_refused(name, folder)
    product.test_every_reader_unpacks_gzip_and_names_a_pointer_of_git_lfs(name, folder)
    product.test_one_odd_value_anywhere_is_read_or_refused_in_a_sentence(
        name=name, tmp_path_factory=tmp_path_factory
    )
