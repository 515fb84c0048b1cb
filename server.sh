#!/usr/bin/env bash
# Serve GPT-2 in one batching mode:  ./server.sh nobatch|static|windowed|multibin|dynamic [settings]   (./server.sh --help)
# The same as N replicas on Ray Serve:  ./server.sh MODE --replicas N [--router NAME] [--autoscale NAME=VALUE …] [settings]
set -euo pipefail
ROOT="$(dirname "$(realpath "${BASH_SOURCE[0]}")")"
case " $* " in
    *" --replicas "* | *" --replicas="*) . "$ROOT/setup.sh" requirements-ray.txt ;;
    *) . "$ROOT/setup.sh" requirements.txt ;;
esac
PYTHONSAFEPATH=1 PYTHONPATH="$ROOT" exec "$PYTHON" -m server.launch "$@"
