#!/usr/bin/env bash
# Make .oracles: the independent implementations that `make oracles` compares with, in an environment of their own.
# Every step leaves a mark and is not done twice; an interrupted run goes on where it stopped.
# Environment: PYTHON (3.11+), TORCH_INDEX (index that holds the torch build you want), JOBS (compilers at once, 2).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-2}
HOME_DIR=$PWD/.oracles
BIN=$HOME_DIR/venv/bin
LLAMA_CPP_PYTHON=0.3.36
SOURCE=$HOME_DIR/src/llama_cpp_python-$LLAMA_CPP_PYTHON
BUILD=$HOME_DIR/llama-build
PACKAGES=(transformers==5.24.0 compressed-tensors==0.20.1 peft==0.21.2 gguf==0.19.0 safetensors==0.8.0
  numpy==2.4.6 einops==0.8.2 diskcache==5.6.3 jinja2==3.1.6)

step() {  # NAME TEXT COMMAND...: run the command unless its mark is there
  local mark=$HOME_DIR/$1.done text=$2
  shift 2
  [[ -e $mark ]] && return
  echo "oracles: $text"
  "$@"
  touch "$mark"
}

venv() { "$PYTHON" -m venv "$HOME_DIR/venv"; }

packages() {
  "$BIN/pip" install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
  "$BIN/pip" install -q "${PACKAGES[@]}"
  # Only fla's plain torch functions are used; its dependency Triton is large and needs a GPU.
  "$BIN/pip" install -q --no-deps fla-core==0.6.0
}

source_tree() {
  mkdir -p "$HOME_DIR/src"
  "$BIN/pip" download -q "llama-cpp-python==$LLAMA_CPP_PYTHON" --no-binary :all: --no-deps -d "$HOME_DIR/src"
  tar -xf "$SOURCE.tar.gz" -C "$HOME_DIR/src"
}

llama() {
  nice -n 10 cmake -S "$SOURCE/vendor/llama.cpp" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  nice -n 10 cmake --build "$BUILD" -j "$JOBS" --target llama llama-server
}

for tool in cmake ninja g++; do
  command -v "$tool" > /dev/null || { echo "oracles: $tool is missing; install cmake, ninja-build and g++" >&2; exit 1; }
done
if [[ ! -e $HOME_DIR/llama.done ]]; then
  echo "oracles: the first time takes 15 to 45 minutes (llama.cpp is compiled) and about 2 GB in .oracles"
fi
mkdir -p "$HOME_DIR"
step venv "making .oracles/venv" venv
step packages "installing torch, transformers, compressed-tensors, peft, fla-core" packages
step source "fetching the sources of llama.cpp" source_tree
step llama "compiling llama.cpp and its server" llama
