# cmake --install: headers, libraries, the LICENSE, the command's traces, and two ways to find the
# library: a CMake package and a pkg-config file. Both name their paths from where they stand, so a
# prefix can be moved as a whole.
include(CMakePackageConfigHelpers)

get_property(layers GLOBAL PROPERTY FERRY_LAYERS)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/ferry")
install(TARGETS ferry ${layers} EXPORT ferryTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
foreach(mpi IN LISTS FERRY_MPIS)
  # In a folder of their own: the command looks for them there, and no linker does.
  install(TARGETS ferry_mpi_${mpi} EXPORT ferryTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}/ferry")
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/ferry" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# The traces that come with the command: it looks for them at ../share, seen from its own folder.
if(FERRY_BUILD_TOOLS)
  cmake_path(SET trace_dir NORMALIZE "${CMAKE_INSTALL_BINDIR}/../share/ferry")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/data/traces" DESTINATION "${trace_dir}")
endif()

# The CMake package. FindIsal goes along, because ISA-L has no CMake package of its own.
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/ferryConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/install/ferryConfig.cmake" INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/install/ferryConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(EXPORT ferryTargets NAMESPACE ferry:: DESTINATION "${package_dir}")
install(FILES "${PROJECT_BINARY_DIR}/install/ferryConfig.cmake"
  "${PROJECT_BINARY_DIR}/install/ferryConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindIsal.cmake" DESTINATION "${package_dir}")

# The pkg-config file. A linker reads static libraries from left to right: users before providers.
# What Ferry itself uses must be linked beside static libraries; a shared one brings it along.
set(pc_libs "")
foreach(layer IN LISTS layers)
  string(PREPEND pc_libs " -l${layer}")
endforeach()
set(pc_requires "fmt libhwy libisal")
if(BUILD_SHARED_LIBS)
  set(pc_requires "")
endif()
file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file("${PROJECT_SOURCE_DIR}/cmake/ferry.pc.in" "${PROJECT_BINARY_DIR}/install/ferry.pc"
  @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/install/ferry.pc"
  DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
