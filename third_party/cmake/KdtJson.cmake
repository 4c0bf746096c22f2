# Target KdtJson: the headers of nlohmann/json, from the Python package `nlohmann-json` or else from
# the system (Debian: nlohmann-json3-dev).
find_package(Python 3.10 COMPONENTS Interpreter)
set(kdt_json_include "")
if(Python_FOUND)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import nlohmann_json; print(nlohmann_json.get_include(), end='')"
    OUTPUT_VARIABLE kdt_json_include ERROR_QUIET)
endif()
add_library(KdtJson INTERFACE)
if(kdt_json_include)
  target_include_directories(KdtJson SYSTEM INTERFACE "${kdt_json_include}")
else()
  find_package(nlohmann_json 3.10 QUIET CONFIG)
  if(NOT nlohmann_json_FOUND)
    message(FATAL_ERROR "nlohmann/json is missing: pip install nlohmann-json "
      "(in the environment of ${Python_EXECUTABLE}) or apt-get install nlohmann-json3-dev")
  endif()
  target_link_libraries(KdtJson INTERFACE nlohmann_json::nlohmann_json)
endif()
