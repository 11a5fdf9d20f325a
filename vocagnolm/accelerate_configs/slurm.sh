#!/usr/bin/env bash
# Hardware: 4 machines with 8 H100 each, under Slurm; requeued when preempted or out of time, until the run is done:
#   sbatch accelerate_configs/slurm.sh --teacher Qwen/Qwen2.5-Math-7B-Instruct --output_dir runs/mine
# The arguments are those of `vocagnolm train`. CONFIG is another --accelerate_config, VENV an environment to activate.
#SBATCH --job-name=vocagnolm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ -n "${VENV:-}" ]]; then source "$VENV/bin/activate"; fi
config=${CONFIG:-fsdp2_32xh100}
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
preempted=

# Five minutes before the end this script is told. It tells one training process of each machine; all of them save at the
# same step and stop. The pattern is of the workers alone, which are started with -u.
preempt() {
  preempted=yes
  srun --overlap --ntasks-per-node=1 pkill -USR1 --uid "$(id -u)" --oldest --full -- '-u -m vocagnolm train' || true
}
trap preempt USR1 TERM

# Since Slurm 22.05 srun does not inherit --cpus-per-task: all processes of a machine would share one core.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
  exec vocagnolm train "${@:3}" --accelerate_config "$0" --machine_rank "$SLURM_NODEID" \
    --num_machines "$SLURM_NNODES" --num_processes "$((8 * SLURM_NNODES))" \
    --main_process_ip "$1" --main_process_port "$2"
' "$config" "$host" "$port" "$@" &
step=$!
while kill -0 "$step" 2>/dev/null; do
  wait "$step" || true  # a trapped signal ends it early
done
status=0
wait "$step" || status=$?
if [[ -n "$preempted" ]]; then
  echo "preempted: requeueing job $SLURM_JOB_ID, which goes on from its newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
