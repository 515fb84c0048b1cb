"""More than one server: replicas on Ray Serve behind one ingress, plain ones behind a proxy."""

import environment  # noqa: F401 - where a package is missing
