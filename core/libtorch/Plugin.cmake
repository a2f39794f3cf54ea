# stratagem_add_plugin(<name> [TORCH] SOURCES <files>...)
#
# A plugin or model library: <build>/lib/stratagem/<name>.so. It exports stg_plugin_probe and nothing else, is never unloaded
# once it is loaded, and is linked to stratagem::base; TORCH adds LibTorch. It may be called from a project that has this one as a
# part: <build> is always Stratagem's.
function(stratagem_add_plugin name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES")
  set(version_script ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin.version)
  add_library(${name} MODULE ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE stratagem::base $<$<BOOL:${arg_TORCH}>:stratagem::libtorch>)
  if(arg_TORCH)  # its note says so: a host compares it with the copy in the process before it runs anything
    target_compile_definitions(${name} PRIVATE STRATAGEM_LIBTORCH_VERSION="${STRATAGEM_TORCH_VERSION}")
  endif()
  target_link_options(${name} PRIVATE
    "LINKER:--version-script=${version_script}" LINKER:-z,nodelete LINKER:-z,noexecstack)
  if(NOT STRATAGEM_SANITIZE)
    target_link_options(${name} PRIVATE LINKER:-z,defs)  # a sanitizer's functions come from the program
  endif()
  # CMake adds the folders of the linked libraries, LibTorch's too, to both.
  set_target_properties(${name} PROPERTIES
    PREFIX ""
    SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${stratagem_BINARY_DIR}/lib/stratagem
    LINK_DEPENDS ${version_script}
    BUILD_RPATH "$ORIGIN"
    INSTALL_RPATH "$ORIGIN;$ORIGIN/.."
    INSTALL_RPATH_USE_LINK_PATH ON)
endfunction()
