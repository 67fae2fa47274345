#!/usr/bin/env bash
# Make .venv-bench beside .venv: TRL, which benchmarks compare with, over the packages of .venv.
# Run again it costs nothing: what was asked for is remembered by its hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted=$(cat requirements-bench.txt requirements-bench-prm.txt scripts/install_bench.sh .venv/installed 2>/dev/null |
  sha256sum | cut -d' ' -f1)
[[ -x .venv-bench/bin/python && "$(cat .venv-bench/installed 2>/dev/null)" == "$wanted" ]] && exit 0

echo "installing requirements-bench.txt into .venv-bench (log: .venv-bench/install.log)" >&2
[[ -x .venv-bench/bin/python ]] || .venv/bin/python -m venv .venv-bench
rm -rf .venv-bench/installed .venv-bench/trl-with-prm
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages .venv >"$(packages .venv-bench)/product.pth"
pip() { .venv-bench/bin/python -m pip --disable-pip-version-check install --no-deps "$@" >>.venv-bench/install.log 2>&1; }
: >.venv-bench/install.log
if ! { pip -r requirements-bench.txt && pip --target .venv-bench/trl-with-prm -r requirements-bench-prm.txt; } ||
  ! .venv-bench/bin/python -c 'from trl import DPOTrainer, SFTTrainer' >>.venv-bench/install.log 2>&1; then
  echo "error: the installation of TRL failed; the end of .venv-bench/install.log:" >&2
  tail -n 5 .venv-bench/install.log >&2
  exit 4
fi
echo "$wanted" >.venv-bench/installed
