#!/usr/bin/env bash
# Style, types and the product's tests:  ./test.sh [--all] [pytest arguments]   (lab/test.sh: the laboratory's)
# --all: also the tests that are marked nightly or extra, and all examples of properties, as CI does.
# --policy FILE.py[:NAME]: only hold your own policies and orders to the contract of all policies.
# course [-k NAME]: only check the exercises of docs/course, which you write in docs/course/mine.
# Tests run in four processes, since they wait more than they compute; -n 0: in one, which --pdb needs.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set/s/^# //p' "$0"; exit ;; esac
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
. "$ROOT/setup.sh" requirements-dev.txt
if [ "${1:-}" = --policy ]; then  # no tests, but the contract for a file of one's own
    shift
    PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m tests.contract --policy "$@"
fi
cd "$ROOT"
if [ "${1:-}" = course ]; then  # whatever their style and types
    shift
    exec "$PYTHON" -m pytest -o addopts=-q -rN docs/course/test_mine.py "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
said="$(mktemp)"
"$PYTHON" -m mypy >"$said" 2>&1 &
mypy=$!
# nothing is in the foreground, which bash would wait for before it ends on a signal
(trap - INT; exec "$PYTHON" -m pytest -n 4 --no-loadscope-reorder "$@") <&0 &
pytest=$!
trap 'kill $mypy $pytest 2>/dev/null || true; rm -f "$said"' EXIT
trap 'wait $pytest' INT # for its summary
wait $pytest && tests=0 || tests=$?
wait $mypy || { cat "$said" >&2; tests=1; }
exit $tests
