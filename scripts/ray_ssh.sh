#!/usr/bin/env bash
# Make a Ray cluster of machines that ssh reaches without a password, run a program on the first, take the cluster down.
# Checkout, environment, models and run directories are at the same paths on all of them. From the root of the checkout:
#
#   bash scripts/ray_ssh.sh "node1 node2" main.py -cn exp/ppo/ppo_word_arithmetic launcher=ray launcher.num_ranks=8 ...
#
# Ends with the program's exit code, but with 0 where Ray itself cannot be started (symmetric-run does so): a run that has
# no model/ is not finished. PORT (6379) is Ray's on the first machine, whose name the others must resolve. Whoever reaches
# that port can run programs: where the machines' network is not your own, put the token of `ray get-auth-token --generate`
# into ~/.ray/auth_token of each and set RAY_AUTH_MODE=token.
set -euo pipefail
read -ra hosts <<<"${1:?name the machines: \"node1 node2\"}"
shift
[[ -f ${1:-} ]] || { echo "error: ${1:-nothing} is no program: name main.py, vllm_inference.py, ..." >&2; exit 2; }
printf -v words '%q ' .venv/bin/python "$@"
printf -v line 'cd %q && PATH="$PWD/.venv/bin:$PATH" RAY_AUTH_MODE=%q exec ray symmetric-run --address %q --min-nodes %d -- %s' \
  "$PWD" "${RAY_AUTH_MODE:-disabled}" "${hosts[0]}:${PORT:-6379}" "${#hosts[@]}" "$words"
others=()
trap 'for pid in "${others[@]}"; do kill "$pid" 2>/dev/null || true; done' EXIT
for host in "${hosts[@]:1}"; do
  ${REMOTE_SHELL:-ssh -tt} "$host" "$line" </dev/null >"ray-$host.log" 2>&1 &
  others+=($!)
done
${REMOTE_SHELL:-ssh -tt} "${hosts[0]}" "$line" </dev/null
