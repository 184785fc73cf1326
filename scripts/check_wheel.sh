#!/usr/bin/env bash
# Build the wheel, install it into an empty environment outside the checkout, and run doctor and chat from there.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$PWD
PIP_CONSTRAINT="$root/constraints.txt" .venv/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps -w "$work/dist" .
"$PYTHON" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet)
torch_index=()
[ -n "${TORCH_INDEX:-}" ] && torch_index=(--index-url "$TORCH_INDEX")
"${pip[@]}" "${torch_index[@]}" "$(grep -E '^torch==' constraints.txt)"
wheel=$(ls "$work"/dist/tidemill-*.whl)
"${pip[@]}" -c "$root/constraints.txt" "$wheel[serve,sandbox,train]"
cd "$work"
"$work/venv/bin/tidemill" --version
"$work/venv/bin/tidemill" doctor
"$work/venv/bin/tidemill" chat --random-init toy --once "hello" --max-tokens 8
"$work/venv/bin/tidemill" chat nano --once "Hello!" --max-tokens 8
echo "wheel: installs, doctor green, chat answers, nano is in it"
