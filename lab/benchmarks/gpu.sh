#!/usr/bin/env bash
# Measure all that is claimed of a GPU, in six minutes at most:  lab/benchmarks/gpu.sh [--only PART] [settings]   (lab/benchmarks/gpu.sh --help)
set -euo pipefail
ROOT="$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../..")"
. "$ROOT/setup.sh" requirements.txt
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m lab.benchmarks.gpu "$@"
