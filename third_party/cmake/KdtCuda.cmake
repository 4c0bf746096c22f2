# Decides whether the CUDA back end is built (kdt_with_cuda) and enables the language when it is.
set(kdt_with_cuda OFF)
if(NOT KDT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KDT_CUDA is '${KDT_CUDA}'; want AUTO, ON or OFF")
endif()

# A GPU counts as present when the driver shows one; no CUDA call is made.
function(kdt_find_gpu result)
  file(GLOB devices "/dev/nvidia[0-9]*" "/proc/driver/nvidia/gpus/*")
  if(devices)
    set(${result} ON PARENT_SCOPE)
  else()
    set(${result} OFF PARENT_SCOPE)
  endif()
endfunction()

# A compiler installed by pip (cuda-toolkit[nvcc,cudart,cccl]) is not in PATH and keeps its static
# runtime in lib, where nvcc does not look by itself.
function(kdt_use_pip_cuda)
  find_program(kdt_nvcc nvcc PATHS /usr/local/cuda/bin NO_CMAKE_SYSTEM_PATH)
  if(kdt_nvcc AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "${kdt_nvcc}" PARENT_SCOPE)
  endif()
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX} OR kdt_nvcc OR NOT Python_FOUND)
    return()
  endif()
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, os
spec = importlib.util.find_spec('nvidia')
roots = [os.path.join(p, 'cu13') for p in (spec.submodule_search_locations if spec else [])]
print(next((r for r in roots if os.path.exists(os.path.join(r, 'bin', 'nvcc'))), ''), end='')
" OUTPUT_VARIABLE root ERROR_QUIET)
  if(root)
    set(CMAKE_CUDA_COMPILER "${root}/bin/nvcc" PARENT_SCOPE)
    # The wheel has no libcudart.so, which CMake looks for although the static runtime is linked.
    file(GLOB cudart "${root}/lib/libcudart.so.*")
    if(cudart)
      list(GET cudart 0 cudart)
      set(CUDA_CUDART "${cudart}" CACHE FILEPATH "CUDA runtime")
    endif()
    set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L${root}/lib")
  endif()
endfunction()

if(NOT KDT_CUDA STREQUAL "OFF")
  kdt_find_gpu(kdt_gpu)
  if(KDT_CUDA STREQUAL "ON" OR kdt_gpu)
    kdt_use_pip_cuda()
    # Read when a target is created, so it is set before the language.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      # Machine code for these, and PTX for chips newer than Hopper that are none of them. Not older PTX:
      # kernels that may start early must hold the instruction that waits (cuda/launch.cuh).
      set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual;120a-real")
    endif()
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      set(kdt_with_cuda ON)
    elseif(KDT_CUDA STREQUAL "ON")
      message(FATAL_ERROR "KDT_CUDA is ON but no CUDA compiler was found: put nvcc into PATH, set "
        "CUDACXX, or let the build fetch one: KDTREE_PIP_CUDA=1 pip install .")
    endif()
  endif()
endif()
message(STATUS "kdtree-engine: CUDA back end ${kdt_with_cuda} (KDT_CUDA=${KDT_CUDA})")
