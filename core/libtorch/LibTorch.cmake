# LibTorch for the targets that need it, and where its CUDA compiler is.
#
# `./run` points Torch_DIR at the PyPI wheel that it installed; -DTorch_DIR= or -DCMAKE_PREFIX_PATH= name another LibTorch.
#
# Gives: target stratagem::libtorch (the CPU part: libtorch_cpu and libc10), STRATAGEM_TORCH_VERSION, STRATAGEM_NVCC,
# option STRATAGEM_CUDA.

# PyPI's LibTorch is the CUDA build. Its package file looks for a CUDA toolkit, fails where there is none, and else overwrites
# CMAKE_CUDA_FLAGS and CMAKE_CUDA_ARCHITECTURES; it does none of that where torch::cudart exists already.
if(NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
endif()
set(kineto_LIBRARY unused)  # only the static build has one; without this a warning that it was not found
find_package(Torch 2.11 REQUIRED)
if(Torch_VERSION VERSION_GREATER_EQUAL 2.16)
  message(WARNING "LibTorch ${Torch_VERSION} is newer than any that Stratagem was built with (2.11 to 2.15).")
endif()
set(STRATAGEM_TORCH_VERSION ${Torch_VERSION} CACHE INTERNAL "what plugins say in their note")
if(TARGET caffe2::mkl)
  # The wheel's own build machine, which would end up in our RUNPATH.
  set_property(TARGET caffe2::mkl PROPERTY INTERFACE_LINK_DIRECTORIES "")
endif()

# Not TORCH_LIBRARIES: that holds libtorch_cuda, which a process without a GPU must not load. Not the target `torch`
# either, for the same reason; the include folders of the C++ API are only on it, hence TORCH_INCLUDE_DIRS.
add_library(stratagem_libtorch INTERFACE)
add_library(stratagem::libtorch ALIAS stratagem_libtorch)
target_include_directories(stratagem_libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(stratagem_libtorch INTERFACE torch_cpu_library)
separate_arguments(torch_cxx_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")  # the C++ library's ABI, in older builds
target_compile_options(stratagem_libtorch INTERFACE ${torch_cxx_flags})
if(STRATAGEM_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(stratagem_libtorch INTERFACE -Wno-maybe-uninitialized)  # GCC 12's false alarms, over optional generators
endif()

# The CUDA compiler: the user's, by the usual variables, else the one beside the wheel. The language is enabled by the targets that
# need it.
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
