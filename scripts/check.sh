#!/usr/bin/env bash
# Check what a change must pass beside its tests: lint, format, types, pages. Without an argument all of them.
#
#   bash scripts/check.sh                bash scripts/check.sh lint format
#
# pages builds docs/ into site/; a broken link or a page that no menu names is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
export NO_MKDOCS_2_WARNING=1 # mkdocs-material 9 speaks of MkDocs 2 at every build
if (($# == 0)); then set -- lint format types pages; fi
for check in "$@"; do
  case $check in
  lint) .venv/bin/ruff check . ;;
  format) .venv/bin/ruff format --check . ;;
  types) .venv/bin/mypy ;;
  pages) .venv/bin/mkdocs build --strict ;; # --quiet would drop the warnings before they count
  *) echo "error: there is no check '$check': choose lint, format, types or pages" >&2 && exit 2 ;;
  esac
done
