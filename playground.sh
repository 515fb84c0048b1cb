#!/usr/bin/env bash
# Build the playground and serve it on this machine:  ./playground.sh [PORT]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" client/requirements.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m simulate.playground.build --serve "$@"
