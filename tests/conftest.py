"""Every test has `tests.plugin`, as the laboratory's have."""

pytest_plugins = ["tests.plugin"]
