# Where the CUDA compiler is: the user's, by the usual variables, else the one beside LibTorch's wheel. The language is enabled by the
# targets that need it.
#
# Gives: STRATAGEM_NVCC, option STRATAGEM_CUDA.
foreach(compiler "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}")
  if(compiler AND NOT STRATAGEM_NVCC)
    set(STRATAGEM_NVCC ${compiler} CACHE FILEPATH "CUDA compiler" FORCE)
  endif()
endforeach()
find_program(STRATAGEM_NVCC nvcc
  HINTS ${CUDAToolkit_ROOT}/bin $ENV{CUDAToolkit_ROOT}/bin $ENV{CUDA_PATH}/bin ${TORCH_INSTALL_PREFIX}/../nvidia/cu13/bin
  PATHS /usr/local/cuda/bin
  DOC "CUDA compiler")
if(STRATAGEM_NVCC)
  set(found_nvcc ON)
else()
  set(found_nvcc OFF)
endif()
option(STRATAGEM_CUDA "Build the CUDA transport (needs nvcc)" ${found_nvcc})
if(STRATAGEM_CUDA AND NOT STRATAGEM_NVCC)
  message(FATAL_ERROR "STRATAGEM_CUDA is ON, but there is no nvcc. Give -DCUDAToolkit_ROOT=<folder> or -DSTRATAGEM_CUDA=OFF.")
endif()
