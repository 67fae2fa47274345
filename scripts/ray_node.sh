#!/usr/bin/env bash
# A part of a Ray cluster on this machine, for ray_ssh.sh and ray_slurm.sh; from the root of the checkout:
#
#   ray_node.sh HOST:PORT head                 Ray's head, until it is ended
#   ray_node.sh HOST:PORT worker               another node, until it is ended; one whose Ray ends by itself joins again
#   ray_node.sh HOST:PORT program NODES ...    on the head's machine, once there are so many nodes: the program, which
#                                              is sent SIGTERM at any signal; its exit code
set -euo pipefail
source scripts/signals.sh
address=$1 role=$2
shift 2
export PATH="$PWD/.venv/bin:$PATH" RAY_ADDRESS="$address" RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
start=(ray start --block --disable-usage-stats)
end_ray() { # while it still looks for its head it does not listen
  kill -TERM "$child" 2>/dev/null || true
  { sleep 10; kill -KILL "$child" 2>/dev/null; } >/dev/null 2>&1 &
}
case $role in
  head)
    ip=$(getent ahostsv4 "${address%:*}" | awk 'NR == 1 { print $1 }') || ip="" # a name of IPv6 alone, say
    [[ $ip == 127.* && ${address%:*} != 127.* ]] && ip="" # its own name for itself: Ray knows a better one
    unset RAY_ADDRESS
    hand_on() { end_ray; }
    run "${start[@]}" --head ${ip:+--node-ip-address="$ip"} --port="${address##*:}" --include-dashboard=false ;;
  worker)
    unset RAY_ADDRESS
    hand_on() { end_ray; }
    until [[ $stopped ]]; do
      run "${start[@]}" --address="$address" || true
      [[ $stopped ]] || sleep 2
    done ;;
  program)
    nodes=$1
    shift
    place=${TMPDIR:-/tmp}/espalier-ray-$(id -u)-${address##*:}.pid # where ray_ssh.sh finds whom to tell
    trap 'rm -f "$place"' EXIT
    echo $$ >"$place"
    run .venv/bin/python -c "from espalier.runtime.ray_cluster import await_nodes; raise SystemExit(await_nodes('$address', $nodes))"
    [[ -z $stopped ]] || exit 143
    run .venv/bin/python "$@" ;;
esac
