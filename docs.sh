#!/usr/bin/env bash
# Build the documentation as a site, and show it:  ./docs.sh [--build] [--port N]
set -euo pipefail
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
. "$ROOT/setup.sh" client/requirements.txt
. "$ROOT/setup.sh" requirements-docs.txt
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m docs.site "$@"
