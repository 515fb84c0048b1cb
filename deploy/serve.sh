#!/usr/bin/env bash
# Replicas on Ray Serve behind one ingress:  ./deploy/serve.sh MODE --replicas N [--router NAME] [settings]   (./deploy/serve.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$ROOT/setup.sh" requirements-ray.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m server.replicas.serve "$@"
