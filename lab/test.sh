#!/usr/bin/env bash
# The laboratory's tests, in four processes:  lab/test.sh [--all] [pytest arguments]   (style and types: ./test.sh)
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^set/s/^# //p' "$0"; exit ;; esac
ROOT="$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/..")"
. "$ROOT/setup.sh" requirements-dev.txt
cd "$ROOT"
exec "$PYTHON" -m pytest -o testpaths=lab/tests -n 4 --no-loadscope-reorder "$@"
