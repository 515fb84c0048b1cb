#!/usr/bin/env bash
# Replay one trace against every batching mode in virtual time:  ./simulate.sh [options]   (./simulate.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" client/requirements.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m simulate "$@"
