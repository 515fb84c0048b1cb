#!/usr/bin/env bash
# Measure all that is claimed of a GPU, in six minutes at most:  lab/benchmarks/gpu.sh [--only PART] [settings]   (lab/benchmarks/gpu.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
. "$ROOT/setup.sh" requirements.txt
cd "$ROOT"
exec "$PYTHON" -m lab.benchmarks.gpu "$@"
