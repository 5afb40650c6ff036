#!/usr/bin/env bash
# From a fresh clone to a trained model: installs what is missing, builds the program, trains configs/quickstart.yaml on four ranks
# and shows how the loss compares with what the text itself allows. Needs no GPU; arguments go to moetrain.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD_DIR:-build/quickstart}
job=configs/quickstart.yaml
ranks=4

scripts/install.sh

cuda=OFF
if [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; then
  cuda=AUTO
fi
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DMOETRAIN_TESTS=OFF -DMOETRAIN_CUDA=$cuda
cmake --build "$build" --parallel "${JOBS:-$(nproc)}" --target moetrain

# Each start trains anew and keeps what is there.
run=runs/quickstart
number=1
while [ -e "$run" ]; do
  number=$((number + 1))
  run=runs/quickstart-$number
done

# Ranks share the cores: more threads than cores would only wait for each other.
cores=$(nproc)
threads=$((cores / ranks > 0 ? cores / ranks : 1))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$threads}
# Containers refuse one process to read another's memory; Open MPI would warn and then copy anyway.
export OMPI_MCA_btl_vader_single_copy_mechanism=none
mpirun=(mpirun -n "$ranks" --oversubscribe --bind-to none --mca mpi_yield_when_idle 1)
if [ "$(id -u)" -eq 0 ]; then
  mpirun+=(--allow-run-as-root)
fi
"${mpirun[@]}" "$build/moetrain" "$job" --set "run.dir=$run" "$@"

python3 scripts/plot_run.py "$run"
echo
python3 scripts/text_entropy.py --job "$job" --metrics "$run/metrics.csv"
echo "loss curve  $run/loss.svg"
echo "checkpoint  $run/checkpoints/$(cat "$run/checkpoints/latest")"
