# shellcheck shell=bash
# The head of scripts/test_on_gpu.sh and scripts/test_multi_gpu.sh, which source it in the repository's folder and call
# its functions in this order. They use BUILD_DIR, OUT and PYTHON as those scripts say.

failed=()
begin() { echo; echo "== $1 ($((SECONDS / 60)) min $((SECONDS % 60)) s)"; }
check() {
  local name=$1
  shift
  begin "$name"
  "$@" || { failed+=("$name"); echo "FAILED: $name"; }
}

# Sets build, out and python; says what the GPUs are and sets gpus, their number, and architecture, CMake's name for it.
find_gpus() {
  build=${BUILD_DIR:-build/gpu} python=${PYTHON:-python3}
  out=${OUT:-$build/results}
  mkdir -p "$build" "$out" || exit 1
  build=$(cd "$build" && pwd) out=$(cd "$out" && pwd)
  command -v nvidia-smi >/dev/null || { echo "no nvidia-smi: is there a GPU?" >&2; exit 1; }
  nvidia-smi --query-gpu=index,name,driver_version,compute_cap,clocks.sm,clocks.mem --format=csv
  gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  case $capability in
    90 | 100 | 120) architecture="${capability}a-real" ;;
    *) architecture="${capability}-real" ;;
  esac
}

# build_for_gpu TARGET...: these, and the package in PYTHONPATH.
build_for_gpu() {
  begin "build for $architecture, GPUs: $gpus"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKDT_CUDA=ON -DKDT_PYTHON=ON -DKDT_TESTS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DPython_EXECUTABLE="$(command -v "$python")" \
    >"$out/cmake.log" 2>&1 || { tail -30 "$out/cmake.log"; exit 1; }
  cmake --build "$build" --target "$@" >"$out/build.log" 2>&1 ||
    { grep -E "error|FAILED" "$out/build.log" | head -30; exit 1; }
  # The package as an install would lay it out: the sources beside the module that was just built.
  local package="$build/package/kdtree_engine"
  rm -rf "$build/package"
  mkdir -p "$package"
  ln -s "$PWD"/python/kdtree_engine/* "$package/"
  cp "$build"/_core*.so "$package/" || exit 1
  export PYTHONPATH="$build/package${PYTHONPATH:+:$PYTHONPATH}"
  export KDT_REQUIRE_DEVICE=1 KDT_LARGE_CASES=1 KDT_BUILD_DIR="$build"
}

# Ends the script that was named.
finish() {
  echo
  if [ ${#failed[@]} -gt 0 ]; then
    printf '%s: failed: %s\n' "$1" "$(IFS=,; echo "${failed[*]}")"
    exit 1
  fi
  echo "$1: all passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
}
