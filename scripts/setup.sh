#!/usr/bin/env bash
# Prepare a checkout: system packages (listed before any is installed), .venv with pinned versions, sandbox runtime and
# template. Does nothing when nothing changed. Variables: PYTHON, TORCH_INDEX (see the README).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
stamp=.venv/.tidemill-setup
want=$(cat pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh src/tidemill/sandbox/guest/*.c | sha256sum | cut -d' ' -f1)

say() { printf 'setup: %s\n' "$*" >&2; }

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  say "Python 3.11 or newer is needed as '$PYTHON'; set PYTHON=/path/to/python3.11"
  exit 2
fi

# -- system packages -------------------------------------------------------------------------------------------------
missing=()
need() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed' || missing+=("$1"); }
if command -v dpkg-query >/dev/null; then
  command -v cc >/dev/null || need gcc
  need libc6-dev
  "$PYTHON" -c 'import ensurepip' 2>/dev/null || need python3-venv
  if [ "$(id -u)" = 0 ]; then need mmdebstrap; fi
else
  command -v cc >/dev/null || { say "a C compiler (cc) is needed to build the sandbox guest agent"; exit 2; }
fi
if [ ${#missing[@]} -gt 0 ]; then
  say "system packages needed: ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing them with apt-get"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
  else
    say "install them first:  sudo apt-get install ${missing[*]}"
    exit 2
  fi
fi

# -- Python environment ----------------------------------------------------------------------------------------------
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  [ -x .venv/bin/python ] || { say "creating .venv"; "$PYTHON" -m venv .venv; }
  pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
  torch_index=()
  [ -n "${TORCH_INDEX:-}" ] && torch_index=(--index-url "$TORCH_INDEX")
  say "installing torch (pinned in constraints.txt)"
  "${pip[@]}" "${torch_index[@]}" "$(grep -E '^torch==' constraints.txt)"
  say "installing tidemill and its pinned dependencies"
  PIP_CONSTRAINT="$PWD/constraints.txt" "${pip[@]}" -e '.[serve,sandbox,train,hf,dev]'
  echo "$want" >"$stamp"
fi

# -- sandbox runtime and template --------------------------------------------------------------------------------------
if [ "$(id -u)" = 0 ]; then
  .venv/bin/tidemill sandbox setup >&2
else
  say "not root: sandboxes cannot be set up here; set E2B_API_URL to use a sandbox service elsewhere"
fi
