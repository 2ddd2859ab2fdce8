# How every Ferry target is compiled, and the one way to declare a layer.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
include(GNUInstallDirs)
# What is installed finds its shared libraries from where it stands, so that a prefix can be moved.
file(RELATIVE_PATH FERRY_BIN_TO_LIB "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
set(CMAKE_INSTALL_RPATH "$ORIGIN" "$ORIGIN/${FERRY_BIN_TO_LIB}")

# -ffp-contract=off: a product is rounded before it is added, in kernels and oracle alike, so that
# all SIMD targets and strategies give the same bits.
add_library(ferry_flags INTERFACE)
target_compile_options(ferry_flags INTERFACE -Wall -Wextra -Wshadow -Wno-sign-conversion
  -ffp-contract=off)
if(FERRY_SANITIZE STREQUAL "address")
  target_compile_options(ferry_flags INTERFACE -fsanitize=address,undefined -fno-omit-frame-pointer
    -fno-sanitize-recover=undefined)
  target_link_options(ferry_flags INTERFACE -fsanitize=address,undefined)
elseif(FERRY_SANITIZE STREQUAL "thread")
  target_compile_options(ferry_flags INTERFACE -fsanitize=thread -fno-omit-frame-pointer)
  target_link_options(ferry_flags INTERFACE -fsanitize=thread)
  # Threads meet alike whatever the SIMD target; the other builds compile and test them all.
  target_compile_definitions(ferry_flags INTERFACE HWY_COMPILE_ONLY_STATIC)
elseif(FERRY_SANITIZE)
  message(FATAL_ERROR "FERRY_SANITIZE=${FERRY_SANITIZE}: allowed are address and thread")
endif()
# The library tells the fuzzer which of its code an input has reached.
if(FERRY_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "FERRY_FUZZ=ON with ${CMAKE_CXX_COMPILER_ID}: allowed is Clang; fix: "
      "-DCMAKE_CXX_COMPILER=clang++, as preset fuzz does")
  endif()
  target_compile_options(ferry_flags INTERFACE -fsanitize=fuzzer-no-link)
  target_compile_definitions(ferry_flags INTERFACE HWY_COMPILE_ONLY_STATIC)
endif()
# clang 14 has C++20 coroutines but does not say so, and libstdc++ asks.
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  target_compile_definitions(ferry_flags INTERFACE __cpp_impl_coroutine=201902L)
endif()
if(FERRY_ASSERT_SLOW)
  target_compile_definitions(ferry_flags INTERFACE FERRY_ASSERT_SLOW_ENABLED=1)
endif()

# ferry_layer(NAME SOURCES ... DEPENDS ...): one library per src/ folder, shared with
# -DBUILD_SHARED_LIBS=ON. A layer sees the public headers, its own folder as "name/..." and what it
# depends on; never a layer above. Layers are declared bottom up; FerryInstall.cmake exports them.
function(ferry_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(ferry_${name} ${ARG_SOURCES})
  target_include_directories(ferry_${name}
    PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
           "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
           "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>")
  target_compile_features(ferry_${name} PUBLIC cxx_std_20)
  # The flags are this build's own: a program that links the library chooses its warnings itself.
  target_link_libraries(ferry_${name} PUBLIC ${ARG_DEPENDS}
    PRIVATE "$<BUILD_INTERFACE:ferry_flags>" ${ARG_PRIVATE_DEPENDS})
  # Before 1.0 a minor version may change the binary interface.
  set_target_properties(ferry_${name} PROPERTIES EXPORT_NAME ${name} VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  set_property(GLOBAL APPEND PROPERTY FERRY_LAYERS ferry_${name})
endfunction()
