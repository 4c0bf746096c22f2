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
cd "$(dirname "$0")/.." || exit 1
. scripts/gpu_build.sh

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
find_gpus
nvidia-smi topo -m 2>/dev/null || true
[ "$gpus" -ge 2 ] || { echo "one GPU: scripts/test_on_gpu.sh is for that" >&2; exit 1; }
sizes=()
for size in 2 4 8; do [ "$size" -le "$gpus" ] && sizes+=("$size"); done
build_for_gpu _core test_communicator test_communicator_gpu
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

finish test_multi_gpu.sh
