#!/bin/bash
#SBATCH --job-name=vit
#SBATCH --nodes=1-4             # as many of these as are free
#SBATCH --ntasks-per-node=1     # torchrun starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300     # five minutes before the end: save, and queue again
#SBATCH --no-kill               # where a node fails, the others go on
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
#   sbatch slurm.sh cifar10/speedrun --output /shared/runs/cifar10-speedrun
#
# The output directory must be one that all nodes see.
set -euo pipefail

# A node that fails takes its store along: each restart then makes a new one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

out_of_time=false
trap 'out_of_time=true; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=0 torchrun \
  --nnodes "1:$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --max-restarts 20 \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_node:29400" \
  -m vit train "$@" --resume &
step=$!
code=0
wait "$step" || code=$?  # also ended by the trap
if "$out_of_time"; then
  wait "$step" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
