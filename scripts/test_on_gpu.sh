#!/usr/bin/env bash
# Builds for this machine's GPU and runs everything that needs one: about five minutes on an H200 with 16 cores.
#
#   scripts/test_on_gpu.sh [--sanitize] [--bench] [--only-bench]
#
# --sanitize    the C++ tests again under compute-sanitizer: memcheck, racecheck and synccheck
# --bench       kdtree bench ops and kdtree bench on the bundled model
# --only-bench  no tests
#
# BUILD_DIR   CMake's folder (default build/gpu)
# OUT         where results go (default BUILD_DIR/results): *.json, the build's log, a sanitizer's findings
# PYTHON      an interpreter with numpy, pytest, pybind11, nlohmann-json and this package's own
#             requirements; nothing is installed and nothing is fetched. nvcc, cmake and ninja must be in PATH.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. scripts/gpu_build.sh

sanitize=0 bench=0 tests=1
for argument in "$@"; do
  case $argument in
    --sanitize) sanitize=1 ;;
    --bench) bench=1 ;;
    --only-bench) bench=1 tests=0 ;;
    -h | --help) sed -n 2,15p "$0"; exit 0 ;;
    *) echo "unknown argument $argument: want --sanitize, --bench or --only-bench" >&2; exit 2 ;;
  esac
done
find_gpus
build_for_gpu all
kdtree() { "$python" -m kdtree_engine "$@"; }

if [ $tests = 1 ]; then
  check "C++ tests" ctest --test-dir "$build" -L cuda -j 4 --output-on-failure --timeout 300
  check "Python tests" "$python" -m pytest -q -m cuda tests/python -p no:cacheprovider
fi
# sanitized TOOL NAME[:FILTER]: a line, and the tool's own words in $OUT when it found something.
sanitized() {
  local log="$OUT/$1-$2.log" name=${2%%:*} filter=""
  [ "$name" = "$2" ] || filter=${2#*:}
  # NCCL asks for kernels that are not there, and tells the driver's refusal to nobody but the tool.
  if timeout 240 compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 \
    "$BUILD/test_$name" $filter >"$log" 2>&1; then
    echo "$1 $2: $(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$log" | tail -1)"
    rm "$log"
  else
    echo "FAILED: $1 $2, see $log"
    return 1
  fi
}
sanitize_all() {
  export -f sanitized
  # Toy sizes, because a check costs a hundredfold; several programs share the card. Of the communicator one family: the
  # tools run kernels of one device one by one, and ranks that wait for each other there come late. By push alone:
  # synccheck reports kernels of NCCL.
  printf '%s\n' {memcheck,racecheck,synccheck}\ {rows,tree,choice,vocabulary_parts,linear,fill,moe,attention,mla_attention,recording,target_model,draft_model,communicator:late} |
    KDT_LARGE_CASES=0 KDT_TEST_DEVICE=cuda KDTREE_ALL_REDUCE=push KDT_TINY_MODEL="$build/tiny_models" OUT="$out" BUILD="$build" \
      xargs -P 6 -n 2 bash -c 'sanitized "$@"' _
}
if [ $sanitize = 1 ]; then check "compute-sanitizer" sanitize_all; fi
if [ $bench = 1 ]; then
  check "kdtree bench ops" kdtree bench ops --device cuda --json "$out/ops.json"
  # The held-out prompts, and the first half of each: 78 in all.
  "$python" - "$out/prompts.json" <<'END'
import json, pathlib, sys
listed = json.loads(pathlib.Path("python/kdtree_engine/models/k2-nano/heldout_prompts.json").read_text())
halves = [{**p, "name": p["name"] + " half", "text": p["text"][: len(p["text"]) // 2 + 1]} for p in listed]
pathlib.Path(sys.argv[1]).write_text(json.dumps(listed + halves))
END
  check "kdtree bench" kdtree bench --device cuda --budgets 1,8,64,65,256,auto --prompts "$out/prompts.json" \
    --json "$out/bench.json"
fi

finish test_on_gpu.sh
