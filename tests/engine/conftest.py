from collections.abc import Iterator

import pytest

from tests.builds import BUILDS, built_for
from tests.counts import nightly_but
from tests.oracle import model as model  # a fixture


@pytest.fixture(params=nightly_but(["this processor"], BUILDS))
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    with built_for(request.param):
        yield request.param
