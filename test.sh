#!/usr/bin/env bash
# Style, types and tests:  ./test.sh [--all] [pytest arguments]
# --policy FILE.py[:NAME]: hold policies and orders of your own to the contract, and nothing else.
# course [-k NAME]: hold the exercises of docs/course in course/mine to their schedules, and no more.
# --all: also the tests that are marked nightly or extra, and all examples of properties, as CI does.
# The tests run in four processes, since they wait more than they compute (-n 0: in one, as --pdb
# needs it); types are checked beside.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" requirements-dev.txt
if [ "${1:-}" = --policy ]; then  # no tests, but the contract for a file of one's own
    shift
    PYTHONPATH="$ROOT" exec "$PYTHON" -m tests.contract --policy "$@"
fi
cd "$ROOT"
if [ "${1:-}" = course ]; then  # whatever their style and types
    exec "$PYTHON" -m pytest -o addopts=-q -rN "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
said="$(mktemp)"
"$PYTHON" -m mypy >"$said" 2>&1 &
mypy=$!
trap 'kill $mypy 2>/dev/null || true; rm -f "$said"' EXIT
"$PYTHON" -m pytest -n 4 --no-loadscope-reorder "$@" && tests=0 || tests=$?
wait $mypy || { cat "$said" >&2; tests=1; }
exit $tests
