# sluice_library(NAME SRCS ... [DEPS ...] [PRIVATE_DEPS ...] [PCH ...])
#
# One library per folder. DEPS are the folders (and outside libraries) that its headers may include;
# the link graph is the architecture, and tests/tidy holds the include lines to it. PCH are its
# precompiled headers, if not sluice_pch.
function(sluice_library name)
  cmake_parse_arguments(ARG "" "PCH" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE sluice_warnings ${ARG_PRIVATE_DEPS})
  if(NOT ARG_PCH)
    set(ARG_PCH sluice_pch)
  endif()
  sluice_use_pch(${name} ${ARG_PCH})
endfunction()

# sluice_binary(NAME SRCS ... DEPS ...): a program in build/<preset>/bin.
function(sluice_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE sluice_warnings ${ARG_DEPS})
  if(SLUICE_JEMALLOC)
    target_link_libraries(${name} PRIVATE PkgConfig::jemalloc)
  endif()
  sluice_use_pch(${name} sluice_pch)
endfunction()

# sluice_test(NAME SRCS ... DEPS ... [LABELS ...] [TIMEOUT ...] [SERIAL]): a Catch2 program; every test
# case is a ctest test. A case that calls SkipTest() makes the program exit with 77, which ctest reports
# as skipped. SERIAL: no other test runs beside its cases, for those that measure time.
#
# Labels: `below-service` (also from SLUICE_TEST_LABELS of the folder) may run under ThreadSanitizer;
# `asan-subset` and `tsan-subset` are what tools/test runs under a sanitizer unless it is told --all.
# Target tests-LABEL builds the programs that have the label.
function(sluice_test name)
  cmake_parse_arguments(ARG "SERIAL" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE sluice_warnings sluice_test_main ${ARG_DEPS})
  sluice_use_pch(${name} ${SLUICE_TEST_PCH})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
    if(SLUICE_SANITIZER)
      set(ARG_TIMEOUT 900)
    endif()
  endif()
  list(APPEND ARG_LABELS ${SLUICE_TEST_LABELS})
  # One word, since catch_discover_tests would flatten a list; ctest -L searches in it.
  string(JOIN "+" labels ${ARG_LABELS})
  catch_discover_tests(${name} TEST_PREFIX "${name}: "
    PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${ARG_TIMEOUT} LABELS "${labels}"
               RUN_SERIAL ${ARG_SERIAL})
  foreach(label IN LISTS ARG_LABELS)
    if(NOT TARGET tests-${label})
      add_custom_target(tests-${label})
    endif()
    add_dependencies(tests-${label} ${name})
  endforeach()
endfunction()

add_library(sluice_warnings INTERFACE)
# g++ 12 reports two things that are not there: -Wrestrict in std::string's operator+ (GCC bug 105329),
# and, under a sanitizer, -Wmaybe-uninitialized inside the standard library.
target_compile_options(sluice_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Werror
  -Wno-restrict>)
if(SLUICE_SANITIZER)
  target_compile_options(sluice_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
endif()

# gRPC brings it to what links it. With it everywhere the options are the same for all, as precompiled
# headers demand.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-pthread>)
if(SLUICE_SANITIZER)
  add_compile_options(-fsanitize=${SLUICE_SANITIZER} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${SLUICE_SANITIZER})
endif()
