#!/usr/bin/env bash
# Build the playground and serve it on this machine:  ./playground.sh [PORT]
set -euo pipefail
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
. "$ROOT/setup.sh" client/requirements.txt
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m simulate.playground.build --serve "$@"
