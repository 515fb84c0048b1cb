#!/usr/bin/env bash
# Carry the app to a machine with torch and without a network (Python 3.12, Linux on x86-64):
#   lab/benchmarks/carry_wheels.sh download [NAME…]   here: fills wheels/, without torch, and without NAMEs
#   lab/benchmarks/carry_wheels.sh install            there: makes .venv of what python3 has, and of wheels/
set -euo pipefail
ROOT="$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/../..")"
cd "$ROOT"
pins() { grep -h == requirements.txt client/requirements.txt; }
case "${1:-}" in
    download)
        . ./setup.sh requirements.txt
        left_out="$(printf '%s|' torch "${@:2}")"
        mapfile -t wanted < <(pins | grep -vE "^(${left_out%|})==")
        # pip takes wheels of a platform that is named here, and of no older one
        mapfile -t platforms < <(printf -- '--platform=manylinux%s_x86_64\n' 1 2010 2014 _2_{17..28})
        rm -rf wheels
        "$PYTHON" -m pip download --dest wheels --only-binary :all: --python-version 3.12 "${platforms[@]}" "${wanted[@]}"
        du -sh wheels
        ;;
    install)
        python3 -m venv --without-pip .venv
        # where python3 is itself an environment's, --system-site-packages would not show its packages
        python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$(echo .venv/lib/python3*/site-packages)/beside.pth"
        mapfile -t names < <(pins | sed 's/==.*//') # of any version: what is there stays
        PIP_USER=no .venv/bin/python -m pip install --no-index --find-links wheels "${names[@]}"
        # setup.sh finds all done
        cat requirements*.txt client/requirements.txt | tee .venv/installed-client-requirements.txt >.venv/installed-requirements.txt
        ;;
    *) sed -n '2,4s/^# //p' "$0" >&2 && exit 2 ;;
esac
