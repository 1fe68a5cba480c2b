#!/bin/bash
# Watch from a data-transfer node for as long as the partition allows, and queue up again: sbatch slurm_sync.sh
#
#SBATCH --job-name=llmtrack-sync
#SBATCH --partition=dtn
#SBATCH --time=1-00:00:00
#SBATCH --cpus-per-task=1
#SBATCH --mem=2G
#SBATCH --signal=B:TERM@120
#SBATCH --output=llmtrack-sync-%j.log
#SBATCH --dependency=singleton
set -u
config="${LLMTRACK_CONFIG:-$HOME/.config/llmtrack.toml}"

llmtrack-sync --watch --config "$config" "$@" &
sync=$!

# Two minutes before the time limit: end cleanly, and let the next job go on. What was sent is remembered.
finish() {
    kill -TERM "$sync" 2>/dev/null
    wait "$sync"
    status=$?
    [ -n "${SLURM_JOB_ID:-}" ] && sbatch "$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')"
    exit "$status"
}
trap finish TERM INT
wait "$sync"
