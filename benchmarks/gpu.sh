#!/usr/bin/env bash
# Measure all that is claimed of a GPU, in nine minutes at most:  benchmarks/gpu.sh [--only PART] [settings]   (benchmarks/gpu.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$ROOT/setup.sh" requirements.txt
cd "$ROOT"
exec "$PYTHON" -m benchmarks.gpu "$@"
