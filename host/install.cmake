# What `cmake --install` lays down: the command line, libstratagem and the plugins; the headers of the ABI; what plugins and model libraries
# in C++ are made of (static libraries, and headers in include/stratagem-core); a CMake package and a pkg-config file.
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/stratagem)
set(sdk stratagem_base stratagem_torch stratagem_torch_runtime stratagem_accelerator stratagem_strategy stratagem_model)
foreach(target stratagem_abi ${sdk})
  string(REPLACE "stratagem_" "" export_name ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${export_name})
endforeach()
set_target_properties(stratagem PROPERTIES EXPORT_NAME host)

install(TARGETS stratagem_abi stratagem EXPORT stratagemTargets)
install(TARGETS ${sdk} EXPORT stratagemSdkTargets)
install(TARGETS stratagem_cli)
install(TARGETS single_device data_parallel torchscript fashion_cnn LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/stratagem)
if(STRATAGEM_CUDA)
  install(TARGETS stratagem_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/stratagem)
endif()
install(DIRECTORY abi/stratagem host/include/stratagem DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
foreach(part base torch accelerator strategy model)
  install(DIRECTORY core/${part} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/stratagem-core FILES_MATCHING PATTERN "*.hpp")
endforeach()
install(FILES abi/config.schema.json DESTINATION ${CMAKE_INSTALL_DATADIR}/stratagem)

install(EXPORT stratagemTargets NAMESPACE stratagem:: DESTINATION ${package_folder})
install(EXPORT stratagemSdkTargets NAMESPACE stratagem:: DESTINATION ${package_folder})
configure_package_config_file(host/stratagemConfig.cmake.in ${PROJECT_BINARY_DIR}/stratagemConfig.cmake
  INSTALL_DESTINATION ${package_folder} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/stratagemConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/stratagemConfig.cmake ${PROJECT_BINARY_DIR}/stratagemConfigVersion.cmake
  core/libtorch/LibTorch.cmake core/libtorch/Plugin.cmake core/libtorch/plugin.version DESTINATION ${package_folder})

file(RELATIVE_PATH up_from_pkgconfig /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(host/stratagem.pc.in ${PROJECT_BINARY_DIR}/stratagem.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/stratagem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
