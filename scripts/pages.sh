#!/usr/bin/env bash
# Write the pages and figures of docs/ that are made from results and source: all, or those that are named.
#
#   bash scripts/pages.sh               bash scripts/pages.sh stages formats settings benchmarks quickstart
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
made=$(mktemp -d)
trap 'rm -r "$made"' EXIT
if (($# == 0)); then set -- stages formats settings benchmarks quickstart; fi
for page in "$@"; do
  file=$page.md
  case $page in
  stages | formats | settings) arguments=(-cn "pages/document_$page") ;;
  benchmarks) arguments=(-cn pages/tabulate_benchmarks) ;;
  quickstart) file=quickstart.svg arguments=(-cn pages/draw_accuracies input=docs/quickstart.json) ;;
  *) echo "error: there is no page '$page' to write: choose stages, formats, settings, benchmarks or quickstart" >&2 && exit 2 ;;
  esac
  "$python" run_stage.py "${arguments[@]}" output="$made/$file"
  mv "$made/$file" "docs/$file"
done
