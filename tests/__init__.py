from config import environment  # noqa: F401 - where a package is missing
