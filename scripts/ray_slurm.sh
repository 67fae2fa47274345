#!/usr/bin/env bash
# A Ray cluster of the nodes of a Slurm job, and a program on the first of them; from the root of the checkout, which
# all nodes must see:
#
#   sbatch --nodes=4 --gpus-per-node=8 scripts/ray_slurm.sh main.py -cn ... launcher=ray launcher.num_ranks=16 \
#     client=ray_engines server=none client.address=auto client.num_engines=16
#
# Ray's symmetric-run hands no signal on: what comes after the last checkpoint is lost when the time is up, so set
# checkpoints.save_every; the same line goes on from there. Where Ray itself cannot be started it ends with 0: a run that
# has no model/ is not finished, whatever the job says.
#SBATCH --job-name=espalier
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this script is started by sbatch}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PATH="$PWD/.venv/bin:$PATH" RAY_AUTH_MODE=token RAY_AUTH_TOKEN # symmetric-run calls ray by its name
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # of this cluster alone; srun hands it to every node
exec srun --kill-on-bad-exit=1 ray symmetric-run --address "$first:$((20000 + SLURM_JOB_ID % 10000))" \
  --min-nodes "$SLURM_JOB_NUM_NODES" -- .venv/bin/python "$@"
