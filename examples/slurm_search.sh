#!/bin/bash
# Searches with as many workers as the job has tasks, then measures the best once more on one node and writes the table.
#   sbatch examples/slurm_search.sh autoshard.toml specs/step.json
# The job file names a storage that all nodes reach, such as storage = "journal:/shared/me/study.log".
# A job that is pre-empted may be submitted again: what was recorded is kept.
#SBATCH --job-name=autoshard
#SBATCH --ntasks=16
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
set -euo pipefail

job=${1:?usage: sbatch slurm_search.sh JOB.toml TABLE.json}
table=${2:?usage: sbatch slurm_search.sh JOB.toml TABLE.json}

srun --kill-on-bad-exit=0 autoshard worker "$job" --log-json
srun --ntasks=1 --nodes=1 --exclusive autoshard finish "$job" --out "$table"
