#!/usr/bin/env bash
# Run the tests (those not marked slow); arguments go to pytest. Makes .venv first where it is missing.
#
#   bash scripts/test.sh                 bash scripts/test.sh tests/data/test_steps.py -k golden
#   bash scripts/test.sh -m slow         the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
unset PYTHONDONTWRITEBYTECODE # the tests and what they start are compiled once, not by every process anew
exec .venv/bin/python -m pytest "$@"
