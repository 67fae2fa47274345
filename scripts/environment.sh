# Sourced by every script: repository root, the venv's python, a faster allocator where it is installed, and
# `stage NAME COMMAND ...`, which runs one stage and notes its seconds in $run/seconds.jsonl.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# --help prints the script's first comment and its settings' defaults, without installing anything
if [[ ${1:-} == --help ]]; then
  awk 'NR == 1 || /^set -/ {next} /^source / {exit} /^settings=/ {skip = 1} !skip {sub(/^# ?/, ""); print}
    skip && /"$/ {skip = 0}' "scripts/$(basename "$0")"
  exit 0
fi
bash scripts/install.sh
python=$PWD/.venv/bin/python
export ESPALIER_OWNER=${ESPALIER_OWNER:-$$} TOKENIZERS_PARALLELISM=false DO_NOT_TRACK=1 PYTHONPATH=$PWD
for library in /usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4; do
  if [[ -e $library && -z ${LD_PRELOAD:-} ]]; then export LD_PRELOAD=$library; fi
done

# One stage. Its seconds go to $run/seconds.jsonl, one line for every time it ran.
stage() {
  local name=$1 started=$SECONDS code=0
  shift
  kill -0 "$ESPALIER_OWNER" 2>/dev/null || exit 143
  printf '\n== %s\n' "$name" >&2
  "$@" || code=$?
  printf '{"stage": "%s", "seconds": %d, "exit_code": %d}\n' "$name" $((SECONDS - started)) "$code" >>"$run/seconds.jsonl"
  if ((code)); then
    echo "error: stage '$name' ended with exit code $code: correct the cause, then run the same command again" >&2
    exit "$code"
  fi
}

# serve MODEL LOG WINDOW: one vLLM server for all stages until `end_server`, which then start none of their own. Nothing
# where the caller named a server, or where FILE.meta.json of every further argument FILE.jsonl says that it is complete.
serve() {
  local model=$1 log=$2 window=$3 file is_needed=
  shift 3
  for file in "$@"; do
    grep -qs '"is_complete": true' "${file%.jsonl}.meta.json" || is_needed=1
  done
  if [[ -n ${ESPALIER_SERVER:-} || -z $is_needed ]]; then return; fi
  mkdir -p "$(dirname "$log")"
  printf '\n== serve %s\n' "$model" >&2
  exec {answers}< <(exec "$python" -m espalier.sampling.server --model "$model" --log "$log" --max-model-len "$window")
  server=$!
  trap end_server EXIT
  read -r ESPALIER_SERVER <&"$answers" || { wait "$server" || exit $?; exit 3; }
  export ESPALIER_SERVER
}
end_server() {
  if [[ -n ${server:-} ]]; then
    kill "$server" 2>/dev/null || true
    wait "$server" || true
    unset ESPALIER_SERVER server
  fi
}

# The experiment of a kind that is made for the task, else word_arithmetic's, whose settings fit any small model.
experiment() {
  local own=exp/$1/$task
  if [[ -f conf/$own.yaml ]]; then echo "$own"; else echo "exp/$1/word_arithmetic"; fi
}

# Arguments `key=value` become shell variables, so that scripts take their settings as the programs do.
# Keys task.* go to $extra, for the sampling programs; objective.*, where a script trains by $objective, to the trainer.
extra=() objective_settings=()
read_settings() {
  local argument key
  for argument in "$@"; do
    key=${argument%%=*}
    if [[ $argument != *=* ]]; then
      echo "error: '$argument' is not key=value; the keys are: $settings (--help explains them)" >&2
      exit 2
    elif [[ " $settings " == *" $key "* ]]; then
      printf -v "$key" '%s' "${argument#*=}"
    elif [[ $key == task.* ]]; then
      extra+=("$argument")
    elif [[ $key == objective.* && " $settings " == *" objective "* ]]; then
      objective_settings+=("$argument")
    else
      echo "error: there is no setting '$key'; the settings are: $settings, and task.*" >&2
      exit 2
    fi
  done
}

# $chosen_objective: the trainer's arguments for $objective and its settings. DPO-positive's penalty takes the place of
# the embedded experiments' pull towards the chosen solutions.
choose_objective() {
  chosen_objective=()
  if [[ -n $objective ]]; then chosen_objective=(objective="$objective"); fi
  if [[ $objective == dpo_positive ]]; then chosen_objective+=(objective.sft_weight=0.0); fi
  chosen_objective+=("${objective_settings[@]}")
}
