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

# serve MODEL LOG WINDOW FILES: one vLLM server, with the settings server.*, for all stages that ask this model until
# `end_server`, which then start none of their own; it ends with the script. It starts once $problems can be read.
# Nothing where one is there already, the caller's or that of a script around this one, or where FILE.meta.json of every
# FILE.jsonl says that it is complete.
serve() {
  local model=$1 log=$2 window=$3 file is_needed=
  shift 3
  for file in "$@"; do
    grep -qs '"is_complete": true' "${file%.jsonl}.meta.json" || is_needed=1
  done
  if [[ -z $is_needed ]]; then return; fi
  if [[ -n ${ESPALIER_SERVER:-} && ${ESPALIER_SERVER_MODEL:-$model} == "$model" ]]; then
    if [[ -z ${ESPALIER_SERVER_MODEL:-} && -v server_settings && ${#server_settings[@]} != 0 ]]; then
      echo "error: server.* says how a server is started, and ESPALIER_SERVER names one that runs: leave out one" >&2
      exit 2
    fi
    return
  fi
  mkdir -p "$(dirname "$log")"
  printf '\n== serve %s\n' "$model" >&2
  exec {answers}< <(exec "$python" -m espalier.sampling.server policy="$model" output="$log" server.log="$log" \
    server.max_model_len="$window" +server.options.block_size=32 "${server_settings[@]}" "${problems[@]}")
  server=$!
  trap end_server EXIT
  read -r ESPALIER_SERVER <&"$answers" || { wait "$server" || exit $?; exit 3; }
  export ESPALIER_SERVER ESPALIER_SERVER_MODEL=$model ESPALIER_SERVER_PID=$server
}
# problems_of SETTINGS: $problems, those of a sampling stage's settings that say which problems it asks.
problems_of() {
  local setting
  problems=()
  for setting in "$@"; do
    case $setting in task=* | task.* | prompt@task.* | requests.*) problems+=("$setting") ;; esac
  done
}
end_server() {
  if [[ -n ${server:-} ]]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true  # after a signal bash no longer knows it as its child
    unset ESPALIER_SERVER ESPALIER_SERVER_MODEL ESPALIER_SERVER_PID server
  fi
}
# free_server: nothing is sampled any more and the device is needed: the server that any of our scripts started is ended.
free_server() {
  if [[ -n ${server:-} ]]; then
    end_server
  elif [[ -n ${ESPALIER_SERVER_PID:-} ]]; then
    kill "$ESPALIER_SERVER_PID" 2>/dev/null || true
    while kill -0 "$ESPALIER_SERVER_PID" 2>/dev/null; do sleep 0.1; done
    unset ESPALIER_SERVER ESPALIER_SERVER_MODEL ESPALIER_SERVER_PID
  fi
}

# choose_sampler: $sampler, the settings of a sampling stage that say who is asked, in a window of $max_length: the
# script's server, or $engines engines of the stage's own.
choose_sampler() {
  if ((engines)); then
    unread "with engines=" server
    sampler=(server=none client=data_parallel_engines client.num_engines="$engines" client.max_model_len="$max_length")
  else
    sampler=(server.max_model_len="$max_length" "${server_settings[@]}")
  fi
}

# on_ranks NAME PROGRAM ARGUMENTS: a stage of a training program, on $nproc ranks; train NAME ARGUMENTS: of
# trainer_base_ds_mul.py.
on_ranks() {
  local name=$1 launcher=()
  shift
  if ((nproc > 1)); then launcher=(launch.py --nproc_per_node="$nproc"); fi
  stage "$name" "$python" "${launcher[@]}" "$@"
}
train() { on_ranks "$1" trainer_base_ds_mul.py "${@:2}"; }

# recipe KIND MODEL SETTINGS: $recipe, the program's arguments for a training of that kind (sft, restem, reward, outcome,
# dpo, ppo) of that model, SETTINGS and deepspeed= among them: of exp= where it is given, else what
# espalier.checks.recipe says, with why in a line. An embedded task without an experiment of its own may take another
# one's, for tiny policies: word_arithmetic's, or the one of all outcome models.
recipe() {
  local kind=$1 model=$2 start='' other=word_arithmetic names words
  shift 2
  case $kind in
  restem) kind=sft start=restem_ ;;
  outcome) start=outcome_pairs_ other=embedded ;;
  ppo) start=rlhf_ ;;
  esac
  if [[ -n $exp ]]; then
    recipe=(-cn "$exp")
  else
    names=$start$task
    if [[ " $embedded " == *" $task "* ]]; then names+=,$start$other; fi
    words=$("$python" -m espalier.checks.recipe "$kind" "$names" "$model" "$nproc" "$@") || exit $?
    read -ra recipe <<<"$words"
  fi
  if [[ -n $deepspeed ]]; then recipe+=(deepspeed="$deepspeed"); fi
  recipe+=("$@")
}

# choose_lengths: $max_tokens and $max_length where they are not given: short for the embedded tasks, whose policies are
# tiny; for others those of published runs on mathematics (Kazemnejad et al. 2024).
embedded="word_arithmetic long_arithmetic long_arithmetic_rare long_arithmetic_rarest rule_logic qa_world shopping_notes"
choose_lengths() {
  local lengths=(1024 2048)
  if [[ " $embedded " == *" $task "* ]]; then lengths=(128 512); fi
  if [[ -z $max_tokens || -z $max_length ]]; then
    max_tokens=${max_tokens:-${lengths[0]}} max_length=${max_length:-${lengths[1]}}
    echo "lengths of task=$task where none are given: max_tokens=$max_tokens max_length=$max_length" >&2
  fi
}

# value_of KEY FILE: the text under a key of a JSON document, "" where there is no such file.
value_of() {
  if [[ -f $2 ]]; then sed -n 's/.*"'"$1"'": *"\([^"]*\)".*/\1/p' "$2"; fi
}

# Arguments `key=value` become shell variables, so that scripts take their settings as the programs do. Those of a stage
# go to it by its prefix, one of $prefixes: sample.params.temperature=0.7 is params.temperature=0.7 in
# ${sample_settings[@]}, and +sample.params.seed=1 is +params.seed=1; server.* and task.* keep their prefix. A script with the prefix task, whose programs ask the task,
# takes prompt=NAME too, a prompt of conf/prompt, among ${task_settings[@]}. objective.* go to the trainer, where a script
# trains by $objective.
objective_settings=()
read_settings() {
  local argument key prefix plus
  for prefix in $prefixes; do declare -ga "${prefix}_settings=()"; done
  for argument in "$@"; do
    plus=
    if [[ ${argument%%=*} == +*.* ]]; then plus=+ argument=${argument#+}; fi
    key=${argument%%=*} prefix=${argument%%.*}
    if [[ $argument != *=* ]]; then
      echo "error: '$argument' is not key=value; the keys are: $settings (--help explains them)" >&2
      exit 2
    elif [[ $key == prompt && " $prefixes " == *" task "* ]]; then
      task_settings+=("prompt@task.template=${argument#*=}")
    elif [[ " $settings " == *" $key "* ]]; then
      printf -v "$key" '%s' "${argument#*=}"
    elif [[ $key == *.pilot ]]; then
      echo "error: a pilot ends the script: give pilot=N to scripts/process_rewards.sh" >&2
      exit 2
    elif [[ $key == *.* && " $prefixes " == *" $prefix "* ]]; then
      local -n target=${prefix}_settings
      if [[ $prefix == server || $prefix == task ]]; then target+=("$plus$argument"); else target+=("$plus${argument#*.}"); fi
    elif [[ $key == prompt || $key == task.* ]]; then
      echo "error: no stage of this script asks the task, so $key= does nothing: leave it out" >&2
      exit 2
    elif [[ $key == objective.* && " $settings " == *" objective "* ]]; then
      objective_settings+=("$plus$argument")
    else
      local keys
      keys=$(xargs <<<"$settings")$(printf ', %s.*' $prefixes)
      echo "error: there is no setting '$plus$key'; the settings are: ${keys/%, task.\*/, task.*, prompt}" >&2
      exit 2
    fi
  done
}

# pass_on PREFIXES: $passed, the settings with these prefixes as they were given, for a script that this one starts.
pass_on() {
  local prefix setting
  passed=()
  for prefix in "$@"; do
    local -n given=${prefix}_settings
    case $prefix in
    server) passed+=("${given[@]}") ;;
    task) passed+=("${given[@]/#prompt@task.template=/prompt=}") ;;
    *)
      for setting in "${given[@]}"; do
        if [[ $setting == +* ]]; then passed+=("+$prefix.${setting#+}"); else passed+=("$prefix.$setting"); fi
      done
      ;;
    esac
  done
}

# unread WHY PREFIXES: end with one line where a setting with one of these prefixes was given, which no stage would read.
unread() {
  local why=$1 prefix
  shift
  for prefix in "$@"; do
    local -n given=${prefix}_settings
    if ((${#given[@]})); then
      if [[ $prefix == task ]]; then prefix="prompt or task"; fi
      echo "error: $prefix.* does nothing $why: leave it out" >&2
      exit 2
    fi
  done
}

# fits PREFIX PROGRAM CONFIG SETTINGS: end with one line where a setting PREFIX.* is none of that program's, before
# anything is paid for.
fits() {
  local prefix=$1 program=$2 config=$3 said
  local -n given=${prefix}_settings
  shift 3
  if ((${#given[@]} == 0)); then return; fi
  said=$("$python" "$program" -cn "$config" "$@" "${given[@]}" --help 2>&1 >/dev/null) || {
    echo "error: $prefix.*: ${said#error: }" >&2
    exit 2
  }
}

# $chosen_objective: the trainer's arguments for $objective and its settings. DPO-positive's penalty takes the place of
# the embedded experiments' pull towards the chosen solutions.
choose_objective() {
  chosen_objective=()
  if [[ -n $objective ]]; then chosen_objective=(objective="$objective"); fi
  if [[ $objective == dpo_positive ]]; then chosen_objective+=(objective.sft_weight=0.0); fi
  chosen_objective+=("${objective_settings[@]}")
}
