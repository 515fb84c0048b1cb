"""The laboratory's tests have what the product's have."""

from tests.config.test_help import shown  # noqa: F401 - a fixture

pytest_plugins = ["tests.plugin"]
