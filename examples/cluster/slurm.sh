#!/bin/bash
# Slurm: one Ray over all nodes of the job, the run on the first of them.
#     sbatch examples/cluster/slurm.sh recipes/cluster_4nodes.yaml
# from a checkout with .venv on a file system that all nodes see. Never run: there is no Slurm where this is developed.
#SBATCH --job-name=nearpolicy
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
# --exclusive: `ray symmetric-run` ends with `ray stop`, which ends every Ray of this user on the node.

set -euo pipefail
recipe=${1:?name a recipe}
shift
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
first_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')
address=$first_ip:6379
# All nodes of a Ray cluster share one token.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
export PATH="$PWD/.venv/bin:$PATH"

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus=8 --object-store-memory=100000000000 \
    -- nearpolicy train "$recipe" runtime.address="$address" "$@"
