#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test. Arguments go to ctest (`scripts/test.sh -L cpu`, `-R ops`).
# BUILD_DIR chooses another build folder, JOBS another number of parallel compilers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD_DIR:-build/test}

scripts/install.sh --tests

# A compiler of our larger files takes up to 2 GiB.
memory_gib=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
cores=$(nproc)
jobs=$((memory_gib / 2 < cores ? memory_gib / 2 : cores))
jobs=${JOBS:-$((jobs > 0 ? jobs : 1))}

cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DMOETRAIN_TESTS=ON
cmake --build "$build" --parallel "$jobs"

sources() {
  find app core parallel ops memory io tests scripts -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.sh' \) "$@"
}
echo
echo "The ten largest source files (lines), and the total:"
sources -exec wc -l {} + | awk '$2 != "total"' | sort -rn | head -n 10
sources -exec cat {} + | wc -l | awk '{printf "%7d lines in all\n\n", $1}'

exec ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "$cores" "$@"
