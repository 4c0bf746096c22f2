# pybind11 from the environment of the chosen interpreter, where a build front end puts it.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import pybind11; print(pybind11.get_cmake_dir(), end='')"
  OUTPUT_VARIABLE kdt_pybind11_dir ERROR_QUIET)
if(kdt_pybind11_dir)
  set(pybind11_DIR "${kdt_pybind11_dir}")
endif()
find_package(pybind11 3 CONFIG REQUIRED)
