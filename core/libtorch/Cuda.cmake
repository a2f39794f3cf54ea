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
foreach(part STRATAGEM_CUDA_INCLUDE_DIR STRATAGEM_NCCL_INCLUDE_DIR STRATAGEM_CUDART STRATAGEM_NCCL)
  if(NOT ${part})
    list(APPEND missing ${part})
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
if(STRATAGEM_CUDA AND missing)
  list(JOIN missing ", " missing)
  message(FATAL_ERROR "STRATAGEM_CUDA is ON, but these were not found: ${missing}. Give -DCUDAToolkit_ROOT=<folder>, -DNCCL_ROOT=<folder>, "
    "a LibTorch that was built with CUDA, or -DSTRATAGEM_CUDA=OFF.")
endif()

if(STRATAGEM_CUDA)
  add_library(stratagem::cuda_headers INTERFACE IMPORTED GLOBAL)
  target_include_directories(stratagem::cuda_headers SYSTEM INTERFACE ${STRATAGEM_CUDA_INCLUDE_DIR} ${STRATAGEM_NCCL_INCLUDE_DIR})
  add_library(stratagem::cudart SHARED IMPORTED GLOBAL)
  set_property(TARGET stratagem::cudart PROPERTY IMPORTED_LOCATION ${STRATAGEM_CUDART})
  add_library(stratagem::nccl SHARED IMPORTED GLOBAL)
  set_property(TARGET stratagem::nccl PROPERTY IMPORTED_LOCATION ${STRATAGEM_NCCL})
endif()
