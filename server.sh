#!/usr/bin/env bash
# Serve GPT-2 in one batching mode:  ./server.sh nobatch|static|windowed|dynamic [settings]   (./server.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$ROOT/setup.sh" requirements.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m server.launch "$@"
