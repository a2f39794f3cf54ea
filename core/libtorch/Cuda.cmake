# What the CUDA transport is built with: the headers and libraries of the CUDA runtime and of NCCL, beside LibTorch's wheel or where the
# usual variables say. There are no kernels, so no CUDA compiler.
#
# Gives: option STRATAGEM_CUDA; where it is on, targets stratagem::cuda_headers, stratagem::cudart and stratagem::nccl.
set(wheels ${TORCH_INSTALL_PREFIX}/../nvidia)
set(toolkits ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_PATH} ${wheels}/cu13 /usr/local/cuda)
find_path(STRATAGEM_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${toolkits} PATH_SUFFIXES include)
find_path(STRATAGEM_NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} ${wheels}/nccl ${toolkits} PATH_SUFFIXES include)
find_file(STRATAGEM_CUDART NAMES libcudart.so.13 HINTS ${toolkits} PATH_SUFFIXES lib lib64)
find_file(STRATAGEM_NCCL NAMES libnccl.so.2 HINTS ${NCCL_ROOT} ${wheels}/nccl ${toolkits} PATH_SUFFIXES lib lib64 lib/x86_64-linux-gnu)

set(missing)
foreach(part STRATAGEM_CUDA_INCLUDE_DIR:cuda_runtime_api.h STRATAGEM_NCCL_INCLUDE_DIR:nccl.h STRATAGEM_CUDART:libcudart.so.13
    STRATAGEM_NCCL:libnccl.so.2)
  string(REPLACE ":" ";" part ${part})
  list(GET part 0 variable)
  list(GET part 1 file)
  if(NOT ${variable})
    list(APPEND missing ${file})
  endif()
endforeach()
if(STRATAGEM_CUDA_INCLUDE_DIR AND NOT EXISTS ${STRATAGEM_CUDA_INCLUDE_DIR}/crt/host_config.h)
  list(APPEND missing crt/host_config.h)  # a package of its own, in PyPI
endif()
if(NOT TARGET torch_cuda_library)
  list(APPEND missing "LibTorch with CUDA")
endif()
if(missing)
  set(can_build OFF)
else()
  set(can_build ON)
endif()
option(STRATAGEM_CUDA "Build the CUDA transport" ${can_build})
list(JOIN missing ", " missing)
if(STRATAGEM_CUDA AND missing)
  message(FATAL_ERROR "STRATAGEM_CUDA is ON, but these were not found: ${missing}. Give -DCUDAToolkit_ROOT=<folder>, -DNCCL_ROOT=<folder>, "
    "a LibTorch that was built with CUDA, or -DSTRATAGEM_CUDA=OFF.")
elseif(missing)
  message(STATUS "The CUDA transport is not built: there is no ${missing}")
endif()

if(STRATAGEM_CUDA)
  add_library(stratagem::cuda_headers INTERFACE IMPORTED GLOBAL)
  target_include_directories(stratagem::cuda_headers SYSTEM INTERFACE ${STRATAGEM_CUDA_INCLUDE_DIR} ${STRATAGEM_NCCL_INCLUDE_DIR})
  add_library(stratagem::cudart SHARED IMPORTED GLOBAL)
  set_property(TARGET stratagem::cudart PROPERTY IMPORTED_LOCATION ${STRATAGEM_CUDART})
  add_library(stratagem::nccl SHARED IMPORTED GLOBAL)
  set_property(TARGET stratagem::nccl PROPERTY IMPORTED_LOCATION ${STRATAGEM_NCCL})
endif()
