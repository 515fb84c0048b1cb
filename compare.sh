#!/usr/bin/env bash
# Replay one trace against every batching mode, print the table, write figures:  ./compare.sh [options]   (./compare.sh --help)
set -euo pipefail
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
case " $* " in
    *" --replicas "* | *" --replicas="*) . "$ROOT/setup.sh" requirements-ray.txt ;;
    *) . "$ROOT/setup.sh" requirements.txt ;;
esac
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m compare "$@"
