#!/usr/bin/env bash
# A Ray cluster of the nodes of a Slurm job, and a program on the first of them; from the root of the checkout, which
# all nodes must see:
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/ray_slurm.sh main.py -cn ... launcher=ray launcher.num_ranks=16 \
#     client=ray_engines server=none client.address=auto client.num_engines=16
#
# Five minutes before the time is up the run saves, and the job is put into the queue again: the same line goes on from
# there. So it does after `scancel --batch --signal=TERM JOB`, without the queue; `scancel JOB` ends it without saving.
# A node that fails does not end the job: with launcher.min_ranks the run goes on with the others.
#SBATCH --job-name=espalier
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this script is started by sbatch}"
source scripts/signals.sh
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # of this cluster alone; srun hands it to every node
nodes=()
end() { # a node that is dead does not answer
  kill "${nodes[@]}" 2>/dev/null || true
  { sleep 30; kill -KILL "${nodes[@]}" 2>/dev/null; } &
  wait "${nodes[@]}" 2>/dev/null || true
  kill $! 2>/dev/null || true
}
trap end EXIT
for number in "${!hosts[@]}"; do
  role=worker
  ((number)) || role=head
  srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --nodelist="${hosts[number]}" \
    bash scripts/ray_node.sh "$address" "$role" &
  nodes+=($!)
done
code=0
run bash scripts/ray_node.sh "$address" program "${#hosts[@]}" "$@" || code=$?
if [[ $stopped == USR1 && $code =~ ^(143|137|3)$ ]]; then # saved, or too late for that: from the last checkpoint
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
