import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_layers.py"
spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
assert spec and spec.loader
check_layers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_layers)


def include(target: str) -> list[str]:
    return ["#pragma once", f'#include "{target}"']


@pytest.mark.parametrize(
    "name, target, allowed",
    [
        ("cpp/io/kdtr.cpp", "core/error.h", True),
        ("cpp/io/kdtr.cpp", "io/kdtr.h", True),
        ("cpp/io/kdtr.cpp", "model/config.h", False),
        ("cpp/core/error.h", "io/kdtr.h", False),
        ("cpp/backend/backend.h", "cpu/kernels.h", False),
        ("cpp/cpu/linear.cpp", "backend/backend.h", True),
        ("cpp/model/config.cpp", "io/json.h", True),
        ("cpp/model/config.cpp", "engine/engine.h", False),
        ("cpp/engine/engine.cpp", "model/config.h", True),
        ("cpp/bindings/module.cpp", "engine/engine.h", True),
        ("cpp/bindings/module.cpp", "cpu/kernels.h", False),
        ("cuda/cuda_backend.cpp", "cuda_check.h", True),
        ("cuda/cuda_backend.cpp", "kernels/norm.h", True),
        ("cuda/cuda_backend.cpp", "model/config.h", False),
        ("cuda/kernels/norm.cu", "kernels/norm.h", True),
        ("cuda/kernels/norm.cu", "core/error.h", True),
        ("cuda/kernels/norm.cu", "core/tensor.h", False),
        ("cuda/kernels/norm.cu", "backend/backend.h", False),
        ("cpp/new/x.cpp", "core/error.h", False),
        ("tests/cpp/check.h", "engine/engine.h", True),
    ],
)
def test_includes_go_down_only(name: str, target: str, allowed: bool) -> None:
    assert (list(check_layers.layer_faults(name, include(target))) == []) == allowed


@pytest.mark.parametrize(
    "name, line, allowed",
    [
        ("cpp/backend/factory.cpp", "#ifdef KDT_WITH_CUDA", True),
        ("cpp/engine/engine.cpp", "if (is_cuda) {", False),
        ("cuda/device.cu", "namespace kdt::cuda {", True),
        ("cpp/bindings/module.cpp", "#include <pybind11/pybind11.h>", True),
        ("cpp/engine/engine.h", "#include <pybind11/pybind11.h>", False),
        ("cpp/io/json.cpp", "#include <nlohmann/json.hpp>", True),
        ("cpp/io/json.h", "#include <nlohmann/json.hpp>", False),
        ("cpp/engine/engine.cpp", "#include <nlohmann/json.hpp>", False),
    ],
)
def test_words_stay_where_they_belong(name: str, line: str, allowed: bool) -> None:
    assert (list(check_layers.word_faults(name, [line])) == []) == allowed


@pytest.mark.parametrize(
    "line, allowed",
    [
        ("pip install kdtree-engine", True),
        ("--index-url https://py" + "pi.org/simple", False),
        ("deb http://ftp.deb" + "ian.org stable main", False),
        ("Someone <someone@deb" + "ian.org>", True),
        ("/usr/local/cuda/bin/nvcc", True),
        ("a path like /ho" + "me/someone/model", False),
        ("open('/wo" + "rk/main/x')", False),
        ("tests/work/x and docs/home", True),
    ],
)
def test_texts_name_no_machine_and_no_registry(line: str, allowed: bool) -> None:
    assert (list(check_layers.text_faults("README.md", [line])) == []) == allowed


def test_a_source_file_has_a_limit() -> None:
    lines = ["x"] * (check_layers.MAX_LINES + 1)
    assert list(check_layers.text_faults("cpp/io/x.cpp", lines))
    assert not list(check_layers.text_faults("cpp/io/x.cpp", lines[1:]))
    assert not list(check_layers.text_faults("tests/cpp/io/x.cpp", lines))
