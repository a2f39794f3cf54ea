# stratagem_add_plugin(<name> [TORCH] SOURCES <files>...)
#
# A plugin or model library: <build>/lib/stratagem/<name>.so. It exports stg_plugin_probe and nothing else, is never unloaded
# once it is loaded, and is linked to stratagem::base; TORCH adds LibTorch. In a project that has this one as a part, <build> is
# Stratagem's; in one that found it installed, its own.
function(stratagem_add_plugin name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH" "" "SOURCES")
  set(version_script ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/plugin.version)
  set(build_folder ${PROJECT_BINARY_DIR})
  if(stratagem_BINARY_DIR)
    set(build_folder ${stratagem_BINARY_DIR})
  endif()
  add_library(${name} MODULE ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE stratagem::base $<$<BOOL:${arg_TORCH}>:stratagem::libtorch>)
  target_compile_options(${name} PRIVATE  # unique symbols would be shared between plugins
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
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
    C_VISIBILITY_PRESET hidden
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY ${build_folder}/lib/stratagem
    LINK_DEPENDS ${version_script}
    BUILD_RPATH "$ORIGIN"
    INSTALL_RPATH "$ORIGIN;$ORIGIN/.."
    INSTALL_RPATH_USE_LINK_PATH ON)
endfunction()
