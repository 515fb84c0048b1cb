#!/usr/bin/env bash
# Build the documentation as a site, and show it:  ./docs.sh [--build] [--port N]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" client/requirements.txt
. "$ROOT/setup.sh" requirements-docs.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m docs.site "$@"
