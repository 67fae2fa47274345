#!/usr/bin/env bash
# Make a Ray cluster of machines that ssh reaches without a password, run a program on the first, take the cluster down.
# Checkout, environment, models and run directories are at the same paths on all of them. From the root of the checkout:
#
#   bash scripts/ray_ssh.sh "node1 node2" main.py -cn exp/ppo/ppo_word_arithmetic launcher=ray launcher.num_ranks=8 ...
#
# Ends with the program's exit code; SIGTERM and Ctrl-C go on to the program, which saves. What the machines' Ray says is
# in ray-0.log, ray-1.log and so on. PORT (6379) is Ray's on the first machine, whose name the others must resolve. Whoever
# reaches that port can run programs: where the machines' network is not your own, put the token of
# `ray get-auth-token --generate` into ~/.ray/auth_token of each and set RAY_AUTH_MODE=token.
set -euo pipefail
read -ra hosts <<<"${1:?name the machines: \"node1 node2\"}"
shift
[[ -f ${1:-} ]] || { echo "error: ${1:-nothing} is no program: name main.py, vllm_inference.py, ..." >&2; exit 2; }
source scripts/signals.sh
address=${hosts[0]}:${PORT:-6379}
read -ra shell <<<"${REMOTE_SHELL:-ssh -tt}"
there() { # HOST WORD...: run ray_node.sh on that machine; it is ended with its connection
  local host=$1 words
  shift
  printf -v words '%q ' "$address" "$@"
  printf -v words 'cd %q && RAY_AUTH_MODE=%q exec bash scripts/ray_node.sh %s' "$PWD" "${RAY_AUTH_MODE:-disabled}" "$words"
  exec setsid "${shell[@]}" "$host" "$words" </dev/null # of its own session: Ctrl-C here does not cut the connection
}
hand_on() {
  local place="\${TMPDIR:-/tmp}/espalier-ray-\$(id -u)-${PORT:-6379}.pid"
  local tell="pid=\$(cat $place) && grep -q ray_node.sh /proc/\$pid/cmdline && kill -TERM \$pid"
  "${shell[@]}" "${hosts[0]}" "$tell" </dev/null >&2 || kill "$child" 2>/dev/null || true
}
nodes=()
trap 'for pid in "${nodes[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done; wait' EXIT
for number in "${!hosts[@]}"; do
  role=worker
  ((number)) || role=head
  there "${hosts[number]}" "$role" >"ray-$number.log" 2>&1 &
  nodes+=($!)
done
run there "${hosts[0]}" program "${#hosts[@]}" "$@"
