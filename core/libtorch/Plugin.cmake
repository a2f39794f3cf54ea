# stratagem_add_plugin(<name> [TORCH] SOURCES <files>...)
#
# A plugin or model library: <build>/lib/stratagem/<name>.so. It exports stg_plugin_probe and nothing else, is never unloaded
# once it is loaded, and is linked to stratagem::base; TORCH adds LibTorch.
set(STRATAGEM_PLUGIN_VERSION_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/plugin.version)

function(stratagem_add_plugin name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES")
  add_library(${name} MODULE ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE stratagem::base $<$<BOOL:${arg_TORCH}>:stratagem::libtorch>)
  if(arg_TORCH)  # its note says so: a host compares it with the copy in the process before it runs anything
    target_compile_definitions(${name} PRIVATE STRATAGEM_LIBTORCH_VERSION="${STRATAGEM_TORCH_VERSION}")
  endif()
  target_link_options(${name} PRIVATE
    "LINKER:--version-script=${STRATAGEM_PLUGIN_VERSION_SCRIPT}" LINKER:-z,nodelete LINKER:-z,noexecstack)
  if(NOT STRATAGEM_SANITIZE)
    target_link_options(${name} PRIVATE LINKER:-z,defs)  # a sanitizer's functions come from the program
  endif()
  # CMake adds the folders of the linked libraries, LibTorch's too, to both.
  set_target_properties(${name} PROPERTIES
    PREFIX ""
    SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib/stratagem
    LINK_DEPENDS ${STRATAGEM_PLUGIN_VERSION_SCRIPT}
    BUILD_RPATH "$ORIGIN"
    INSTALL_RPATH "$ORIGIN;$ORIGIN/.."
    INSTALL_RPATH_USE_LINK_PATH ON)
endfunction()
