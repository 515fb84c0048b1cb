#!/usr/bin/env bash
# Replay one trace against every batching mode in virtual time:  ./simulate.sh [options]   (./simulate.sh --help)
set -euo pipefail
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
. "$ROOT/setup.sh" client/requirements.txt
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m simulate "$@"
