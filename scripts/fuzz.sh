#!/usr/bin/env bash
# Runs the fuzz targets of the file readers, each for SECONDS (default 60), from seeds made here.
#
#   scripts/fuzz.sh [SECONDS] [TARGET...]
#
# Needs clang (CLANGXX, default clang++ or clang++-14) with its libFuzzer runtime. The corpus grows in
# BUILD_DIR/corpus (BUILD_DIR default build/fuzz); a crash leaves its input in BUILD_DIR and ends with status 1.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(safetensors kdtr config)
build=${BUILD_DIR:-build/fuzz}
python=${PYTHON:-python3}
clangxx=${CLANGXX:-$(command -v clang++ || command -v clang++-14 || true)}
if [ -z "$clangxx" ]; then
  echo "fuzz.sh: no clang++; install clang-14 and libclang-rt-14-dev, or set CLANGXX" >&2
  exit 1
fi

cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$clangxx" -DKDT_FUZZ=ON -DKDT_TESTS=OFF \
  -DKDT_CUDA=OFF -DPython_EXECUTABLE="$(command -v "$python")" >/dev/null
cmake --build "$build" --target fuzz_targets

"$python" scripts/make_fuzz_seeds.py "$build/corpus"
for target in "${targets[@]}"; do
  echo "== fuzz_$target, $seconds s"
  log="$build/fuzz_$target.log"
  if ! "$build/fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="$build/$target-" "$build/corpus/$target" >"$log" 2>&1; then
    tail -40 "$log"
    echo "fuzz.sh: fuzz_$target failed; the input is $build/$target-*" >&2
    exit 1
  fi
  grep -E "^(Done|stat::number_of_executed_units|stat::new_units_added)" "$log"
done
