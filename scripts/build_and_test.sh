#!/usr/bin/env bash
# Builds the package and the C++ tests, installs it into a virtual environment, runs ctest and pytest.
#
#   scripts/build_and_test.sh [PYTEST_ARGUMENT...]
#
# VENV        virtual environment, made when it is not there (default .venv)
# BUILD_DIR   CMake's folder, kept between runs (default build)
# PYTHON      the interpreter to make the environment with (default python3)
# EXTRAS      extras to install (default test)
# JOBS        compilers at once (default: one a core)
#
# Takes three to six minutes on two cores, less when the build folder is there already.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
build=${BUILD_DIR:-build}
jobs=${JOBS:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}
step="start"
begin() {
  step=$1
  echo "== $step ($((SECONDS / 60)) min $((SECONDS % 60)) s)"
}
echo "Building and testing takes three to six minutes on two cores."
hint=""
trap 'echo "build_and_test.sh: failed at: $step" >&2; [ -z "$hint" ] || echo "  $hint" >&2' ERR

begin "virtual environment $venv"
hint="Debian and Ubuntu need the packages python3-venv and python3-dev for this."
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
export PATH="$venv/bin:$PATH"

begin "build tools"
hint="pip could not install them; is a package index reachable?"
python -m pip install --quiet --disable-pip-version-check "scikit-build-core>=0.11" "pybind11>=3" \
  "nlohmann-json>=3.11" "cmake>=3.26" "ninja>=1.11"

begin "build and install of the package"
hint="A C++20 compiler is needed (g++ 12 or newer); CXX names another. Try again with an empty $build."
export CMAKE_BUILD_PARALLEL_LEVEL=$jobs
if [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ] && command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
  --config-settings=build-dir="$build" --config-settings=cmake.define.KDT_TESTS=ON ".[${EXTRAS:-test}]"

begin "import of the compiled module"
hint="The package was installed without it; see the output of the build above."
python -c "import kdtree_engine._core"

begin "ctest"
hint="One test again: ctest --test-dir $build -R NAME --output-on-failure"
ctest --test-dir "$build" --output-on-failure -j "$jobs"

begin "pytest"
hint="One test again: KDT_BUILD_DIR=$build $venv/bin/python -m pytest tests/python -k NAME"
KDT_BUILD_DIR="$(cd "$build" && pwd)" python -m pytest "$@"
