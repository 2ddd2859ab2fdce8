# Which MPIs a module is built for: FERRY_MPIS, of openmpi and mpich. Both may be installed side by
# side, and each names its flags in a pkg-config file; find_package(MPI) knows only one.
set(FERRY_MPIS "")
if(FERRY_BUILD_MPI)
  find_package(PkgConfig QUIET)
endif()
if(PkgConfig_FOUND)
  pkg_check_modules(openmpi QUIET IMPORTED_TARGET ompi-c)
  pkg_check_modules(mpich QUIET IMPORTED_TARGET mpich)
  foreach(mpi openmpi mpich)
    if(${mpi}_FOUND)
      list(APPEND FERRY_MPIS ${mpi})
    endif()
  endforeach()
endif()

# A program and the module that it loads share classes with virtual functions: both know a number that
# changes with every header which describes them.
file(GLOB interface_headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/ferry/*.hpp"
  "${PROJECT_SOURCE_DIR}/src/transport/mpi/mpi_module.hpp")
set(interface_hashes "")
foreach(header IN LISTS interface_headers)
  file(SHA256 "${header}" hash)
  string(APPEND interface_hashes "${hash}")
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${interface_headers})
string(SHA256 hash "${interface_hashes}")
string(SUBSTRING "${hash}" 0 8 hash)
set(FERRY_MPI_INTERFACE "FERRY_MPI_INTERFACE=0x${hash}U")
