#!/usr/bin/env bash
# Repeat a result as it was made:  lab/again.sh results/NAME
# Runs its command in a worktree of its commit, with that commit's requirements, and shows both numbers.
set -euo pipefail
case "${1:--h}" in -h | --help) sed -n '2,/^set/s/^# //p' "$0"; exit ;; esac
ROOT="$(realpath "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/..")"
. "$ROOT/setup.sh" requirements.txt
again() { (cd "$ROOT" && "$PYTHON" -m lab.again "$@"); }
made="$(again "$1")"
{ read -r commit; read -r command; read -r old; } <<<"$made"
folder="$(mktemp -d)"
tree="$folder/code" new="$folder/new"
git -C "$ROOT" worktree add --quiet --detach "$tree" "$commit"
trap 'git -C "$ROOT" worktree remove --force "$tree"' EXIT
required() { cat "$1"/requirements*.txt "$1/client/requirements.txt"; }
if [ "$(required "$ROOT")" = "$(required "$tree")" ]; then
    ln -s "$ROOT/.venv" "$tree/.venv"
else
    (ROOT="$tree"; . "$tree/setup.sh" requirements.txt)
fi
case "$command" in
    *" --out "*) command="$(sed -E "s# --out +[^ ]+# --out $new#" <<<"$command")" ;;
    *) [ "${old%.md}" != "$old" ] || command="$command --out $new" ;; # a page alone: printed
esac
echo "commit $commit: $command" >&2
(cd "$tree" && PATH="$tree/.venv/bin:$PATH" bash -c "$command") | tee "$folder/printed.txt"
echo "old: $old"
echo "new: $([ -e "$new" ] && echo "$new" || echo "$folder/printed.txt")"
name="$(basename "${old%.gz}")"
for found in "$new/$name" "$new/$name.gz"; do
    case "$name" in *.json) [ ! -e "$found" ] || again "$old" "$found" ;; esac
done
