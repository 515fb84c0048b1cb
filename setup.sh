# Sourced by the other scripts: makes .venv and installs the given requirements file, if that was
# not done yet.
#   . "$ROOT/setup.sh" requirements.txt
# Afterwards $PYTHON is the environment's interpreter.

# Modules are compiled as they are first imported: compiling all that is installed takes longer than
# installing it. A hundred servers would each compile theirs if that were not kept.
unset PYTHONDONTWRITEBYTECODE
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

_newest_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

_set_up() {
    local wanted="$1" stamp="$VENV/installed-${1//\//-}" contents python
    local -x PYTHONSAFEPATH=1 # a pip.py or venv.py of the current folder is not Python's
    contents="$(cat "$ROOT"/requirements*.txt "$ROOT/client/requirements.txt")"
    if [ -x "$PYTHON" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$contents" ]; then return; fi
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then # none that runs, or an interrupted one
        python="$(_newest_python)" || { echo "error: Python 3.11 or newer is needed; install it and try again" >&2; return 2; }
        echo "making .venv with $("$python" --version)" >&2
        "$python" -m venv $([ -x "$PYTHON" ] || echo --clear) "$VENV" ||
            { echo "error: .venv could not be made; see the message above (on Debian and Ubuntu: apt install python3-venv)" >&2; return 2; }
    fi
    echo "installing $wanted; this takes minutes the first time" >&2
    # what is installed goes to .venv, wherever a user's own packages go
    unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN PIP_NO_DEPS
    export PIP_USER=no PIP_DISABLE_PIP_VERSION_CHECK=1
    case "$wanted" in
        client/* | requirements-docs.txt) ;; # without torch
        *) "$PYTHON" -m pip install --quiet --no-compile "$(grep '^torch==' "$ROOT/requirements.txt")" ;;
    esac &&
        "$PYTHON" -m pip install --quiet --no-compile -r "$ROOT/$wanted" ||
        { echo "error: pip could not install $wanted; see its message above" >&2; return 2; }
    printf '%s\n' "$contents" >"$stamp"
}

_set_up "$1" || exit $?
