#!/usr/bin/env bash
# Several servers behind HAProxy:  deploy/proxy.sh MODE --replicas N [settings]   (deploy/proxy.sh --help)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$ROOT/setup.sh" requirements.txt
PYTHONPATH="$ROOT" exec "$PYTHON" -m deploy.proxy "$@"
