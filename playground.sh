#!/usr/bin/env bash
# Build the playground and serve it on this machine:  ./playground.sh [PORT]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" client/requirements.txt
cd "$ROOT"
"$PYTHON" -m playground.build
echo "http://localhost:${1:-8600}/   (Ctrl-C ends it)"
"$PYTHON" -m http.server "${1:-8600}" --bind 127.0.0.1 --directory playground/site >/dev/null 2>&1 ||
    { echo "error: port ${1:-8600} cannot be used; choose another: ./playground.sh PORT" >&2; exit 2; }
