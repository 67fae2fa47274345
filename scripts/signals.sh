# Source this: `run COMMAND` returns the command's own exit code, and at SIGTERM, SIGINT, SIGHUP and SIGUSR1 calls
# `hand_on`, which sends the command SIGTERM unless the script says otherwise, and waits on. `stopped` is then not empty.
stopped="" child=""
hand_on() { kill -TERM "$child" 2>/dev/null || true; }
for signal in TERM INT HUP USR1; do
  # shellcheck disable=SC2064
  trap "stopped=$signal; [[ -z \$child ]] || hand_on" "$signal"
done
run() {
  local code again
  [[ -z $stopped ]] || return 143
  "$@" &
  child=$!
  [[ -z $stopped ]] || hand_on # it came between these lines
  while true; do
    wait "$child" && code=0 || code=$?
    ((code > 128)) && kill -0 "$child" 2>/dev/null || break # a signal ends the wait, not the command
  done
  if ((code > 128)); then
    wait "$child" 2>/dev/null && again=0 || again=$?
    ((again == 127)) || code=$again
  fi
  child=""
  return "$code"
}
