#!/usr/bin/env bash
# Every check that runs no test: layers, Python style and types, C++ format, headers that compile alone.
#
#   scripts/lint.sh
#
# The tools come from the `dev` extra; put its environment into PATH, or name it: VENV=.venv scripts/lint.sh
set -uo pipefail
cd "$(dirname "$0")/.."
if [ -n "${VENV:-}" ]; then PATH="$(cd "$VENV" && pwd)/bin:$PATH"; fi

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}

# `*_impl.h` is the body of a source file that is compiled once for each instruction set. Those of kernels are compiled
# against the emulator, as everywhere without nvcc.
headers_compile_alone() {
  local include status=0 header
  include="$(python -c 'import pybind11, sysconfig
print("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include"))')" || return 1
  while read -r header; do
    # shellcheck disable=SC2086
    printf '#include "%s"\n' "$header" |
      "${CXX:-c++}" -std=c++20 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsyntax-only -DKDT_EMULATOR \
        -I. -Icpp -Icuda -Itests/emulator $include -x c++ - ||
      { echo "$header does not compile alone"; status=1; }
  done < <(git ls-files --cached --others --exclude-standard -- \
    'cpp/*.h' 'cuda/*.h' 'cuda/*.cuh' 'tests/emulator/*.h' ':!*_impl.h')
  return $status
}

cpp_files() { git ls-files --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh'; }

check "layers and words" python scripts/check_layers.py
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "clang-format" bash -c "$(declare -f cpp_files); cpp_files | xargs clang-format --dry-run -Werror"
check "headers compile alone" headers_compile_alone

if [ ${#failed[@]} -gt 0 ]; then
  printf 'lint.sh: failed: %s\n' "${failed[*]}" >&2
  echo "lint.sh: \`ruff check --fix . && ruff format .\` and \`clang-format -i FILE\` mend most of it" >&2
  exit 1
fi
