#!/usr/bin/env bash
# Style, types and tests:  ./test.sh [pytest arguments]
# The tests run in two processes (-n 0: in one, as --pdb needs it), the types are checked beside them.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" requirements-dev.txt
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
said="$(mktemp)"
"$PYTHON" -m mypy >"$said" 2>&1 &
mypy=$!
trap 'kill $mypy 2>/dev/null || true; rm -f "$said"' EXIT
"$PYTHON" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" && tests=0 || tests=$?
wait $mypy || { cat "$said" >&2; tests=1; }
exit $tests
