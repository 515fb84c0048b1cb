from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.builds import BUILDS, built_for
from tests.counts import nightly_but
from tests.oracle import model as model  # a fixture


@pytest.fixture(params=nightly_but(["this processor"], BUILDS))
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with built_for(request.param):
        yield request.param


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter adds a product's terms one after another, whichever row they are of: the
    BLAS that it calls has other kernels for the last rows.
    """

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return (a[..., None] * b[..., None, :, :]).sum(-2, dtype=dtype)

    monkeypatch.setattr(np, "matmul", matmul)
