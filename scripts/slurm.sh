#!/usr/bin/env bash
# Train on one or many nodes of a Slurm cluster; the arguments are those of trainer_base_ds_mul.py. From the root of
# the checkout, which all nodes must see:
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm.sh -cn exp/dpo/logiqa_outcome_pairs output_dir=... deepspeed=zero3
#
# Slurm sends SIGTERM five minutes before the time is up: the run saves, ends with 143, and the same line goes on.
#SBATCH --job-name=espalier
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=slurm-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this script is started by sbatch}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-8} / ${SLURM_GPUS_ON_NODE:-1}))
exec srun --kill-on-bad-exit=1 .venv/bin/python launch.py --nnodes="$SLURM_JOB_NUM_NODES" \
  --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d \
  --rdzv_endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))" trainer_base_ds_mul.py "$@"
