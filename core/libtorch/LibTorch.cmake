# LibTorch for the targets that need it. Installed with them, too.
#
# `./run` points Torch_DIR at the PyPI wheel that it installed; -DTorch_DIR= or -DCMAKE_PREFIX_PATH= name another LibTorch.
#
# Gives: target stratagem::libtorch (the CPU part: libtorch_cpu and libc10), STRATAGEM_TORCH_VERSION.

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
# Imported: what we install names it, and a user's project finds a LibTorch of its own.
add_library(stratagem::libtorch INTERFACE IMPORTED GLOBAL)
target_include_directories(stratagem::libtorch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(stratagem::libtorch INTERFACE torch_cpu_library)
separate_arguments(torch_cxx_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")  # the C++ library's ABI, in older builds
target_compile_options(stratagem::libtorch INTERFACE ${torch_cxx_flags})
if(STRATAGEM_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(stratagem::libtorch INTERFACE -Wno-maybe-uninitialized)  # GCC 12's false alarms, over optional generators
endif()
