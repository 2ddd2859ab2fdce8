# What this configuration builds, and how to turn the rest on.
function(ferry_summary_line name enabled how)
  if(enabled) # not `on`: that word is a constant, always true
    message(STATUS "  ${name}: on")
  else()
    message(STATUS "  ${name}: off (${how})")
  endif()
endfunction()
message(STATUS "Ferry ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
ferry_summary_line("command" "${FERRY_BUILD_TOOLS}" "-DFERRY_BUILD_TOOLS=ON")
ferry_summary_line("tests" "${FERRY_BUILD_TESTS}" "-DFERRY_BUILD_TESTS=ON and libgtest-dev")
ferry_summary_line("examples" "${FERRY_BUILD_EXAMPLES}" "-DFERRY_BUILD_EXAMPLES=ON")
ferry_summary_line("micro-benchmarks" "${FERRY_BUILD_BENCHMARKS}" "-DFERRY_BUILD_BENCHMARKS=ON, needs libbenchmark-dev")
ferry_summary_line("sanitizers" "${FERRY_SANITIZE}" "-DFERRY_SANITIZE=address or thread")
