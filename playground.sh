#!/usr/bin/env bash
# Serve the playground on this machine, and build it first if it is not there:  ./playground.sh [PORT]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" client/requirements.txt
cd "$ROOT"
"$PYTHON" -m playground.build
echo "http://localhost:${1:-8600}/   (Ctrl-C ends it)"
exec "$PYTHON" -m http.server "${1:-8600}" --bind 127.0.0.1 --directory playground/site >/dev/null 2>&1
