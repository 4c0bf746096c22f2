#!/usr/bin/env bash
# Builds for this host's GPUs and runs what needs several of them, on 2, 4 and 8 as far as they go: under ten minutes
# on eight H200 with 128 cores.
#
#   scripts/test_multi_gpu.sh [--only-bench | --only-tests]
#
# Every size: the programs of the communicators (push and NCCL: sums, gathers, late ranks, graphs, times by size), the
# engine on a rank a GPU in one process and in several, killed ranks, and kdtree bench rank.
#
# BUILD_DIR   CMake's folder (default build/gpu)
# OUT         where results go (default BUILD_DIR/results): rank-N.json, communicator-N.log, the build's log
# LAYERS      of the model of kdtree bench rank (default 4, 35 GB)
# PYTHON      an interpreter with numpy, pytest, pybind11, nlohmann-json and this package's own
#             requirements; nothing is installed and nothing is fetched. nvcc, cmake and ninja must be in PATH.
set -uo pipefail
cd "$(dirname "$0")/.."

build=${BUILD_DIR:-build/gpu}
python=${PYTHON:-python3}
out=${OUT:-$build/results}
layers=${LAYERS:-4}
tests=1 bench=1
for argument in "$@"; do
  case $argument in
    --only-bench) tests=0 ;;
    --only-tests) bench=0 ;;
    -h | --help) sed -n 2,14p "$0"; exit 0 ;;
    *) echo "unknown argument $argument: want --only-bench or --only-tests" >&2; exit 2 ;;
  esac
done
mkdir -p "$build" "$out"
build=$(cd "$build" && pwd) out=$(cd "$out" && pwd)

failed=()
begin() { echo; echo "== $1 ($((SECONDS / 60)) min $((SECONDS % 60)) s)"; }
check() {
  local name=$1
  shift
  begin "$name"
  "$@" || { failed+=("$name"); echo "FAILED: $name"; }
}

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: is there a GPU?" >&2; exit 1; }
nvidia-smi --query-gpu=index,name,driver_version,compute_cap,clocks.sm,clocks.mem --format=csv
nvidia-smi topo -m 2>/dev/null || true
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
[ "$gpus" -ge 2 ] || { echo "one GPU: scripts/test_on_gpu.sh is for that" >&2; exit 1; }
sizes=()
for size in 2 4 8; do [ "$size" -le "$gpus" ] && sizes+=("$size"); done
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
case $capability in
  90 | 100 | 120) architecture="${capability}a-real" ;;
  *) architecture="${capability}-real" ;;
esac

begin "build for $architecture, $gpus GPUs"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKDT_CUDA=ON -DKDT_PYTHON=ON -DKDT_TESTS=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DPython_EXECUTABLE="$(command -v "$python")" \
  >"$out/cmake.log" 2>&1 || { tail -30 "$out/cmake.log"; exit 1; }
cmake --build "$build" --target _core test_communicator test_communicator_gpu >"$out/build.log" 2>&1 ||
  { grep -E "error|FAILED" "$out/build.log" | head -30; exit 1; }

# The package as an install would lay it out: the sources beside the module that was just built.
package="$build/package/kdtree_engine"
rm -rf "$build/package"
mkdir -p "$package"
ln -s "$PWD"/python/kdtree_engine/* "$package/"
cp "$build"/_core*.so "$package/"
export PYTHONPATH="$build/package${PYTHONPATH:+:$PYTHONPATH}"
export KDT_REQUIRE_DEVICE=1 KDT_LARGE_CASES=1 KDT_BUILD_DIR="$build"
# Sums on the NVLink switch are not in rank order, and multicast memory can take the host's GPUs out of service.
export NCCL_NVLS_ENABLE=0
nccl=$("$python" -c 'from kdtree_engine.locations import find_nccl; print(find_nccl() or "")')
[ -z "$nccl" ] || export KDTREE_NCCL_LIBRARY=${KDTREE_NCCL_LIBRARY:-$nccl}
export KDTREE_READERS=${KDTREE_READERS:-16}
# limited SECONDS COMMAND...: no longer than that, nor than ten minutes of the whole visit.
limited() {
  local most=$((580 - SECONDS))
  [ "$most" -gt 5 ] || { echo "no time left"; return 1; }
  [ "$1" -lt "$most" ] && most=$1
  shift
  timeout "$most" "$@"
}
# communicator SIZE: on so many GPUs. The times of each way are in its log.
communicator() {
  local log="$out/communicator-$1.log" name status=0
  for name in communicator communicator_gpu; do
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $(($1 - 1))) KDT_TEST_DEVICE=cuda limited 100 "$build/test_$name" || status=1
  done >"$log" 2>&1
  grep " $1 ranks: " "$log"
  [ $status = 0 ] || tail -30 "$log"
  return $status
}

if [ $tests = 1 ]; then
  for size in "${sizes[@]}"; do check "communicators on $size GPUs" communicator "$size"; done
  check "engine" limited 240 "$python" -m pytest -q -m cuda tests/python/test_tensor_parallel_cuda.py \
    -p no:cacheprovider -k "each or killed or real_width" --durations 5 -rs
fi
if [ $bench = 1 ]; then
  for size in "${sizes[@]}"; do
    check "kdtree bench rank on $size GPUs" limited 100 "$python" -m kdtree_engine bench rank \
      --layers "$layers" --tp "$size" --device cuda --json "$out/rank-$size.json"
  done
fi

echo
if [ ${#failed[@]} -gt 0 ]; then
  printf 'test_multi_gpu.sh: failed: %s\n' "$(IFS=,; echo "${failed[*]}")"
  exit 1
fi
echo "test_multi_gpu.sh: all passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
