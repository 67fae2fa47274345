# Source this: `run COMMAND` returns the command's own exit code, and at SIGTERM, SIGINT, SIGHUP and SIGUSR1 calls
# `hand_on`, which sends the command SIGTERM unless the script says otherwise, and waits on. `stopped` is then not empty.
stopped="" child=""
hand_on() { kill -TERM "$child" 2>/dev/null || true; }
for signal in TERM INT HUP USR1; do
  # shellcheck disable=SC2064
  trap "stopped=$signal; [[ -z \$child ]] || hand_on" "$signal"
done
run() {
  local code=0
  [[ -z $stopped ]] || return 143
  "$@" &
  child=$!
  [[ -z $stopped ]] || hand_on                           # it came between these lines
  while kill -0 "$child" 2>/dev/null; do sleep 0.2; done # a signal just before `wait` sleeps would be seen at its end
  wait "$child" || code=$?
  child=""
  return "$code"
}
