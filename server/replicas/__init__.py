"""More than one server: replicas on Ray Serve behind one ingress."""

from config import environment  # noqa: F401 - where a package is missing
