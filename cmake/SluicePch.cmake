# Precompiled headers. Most of what a file of ours takes to compile is the standard library, Abseil and,
# in tests, Catch2. They are parsed once for each set of compile options, not once for each file.
#
# Only headers of the system are in them: a change of ours compiles what includes it, no more. Every file
# still includes what it uses, as if there were none: preset `package` and clang-tidy compile without.

# sluice_pch(NAME HEADER...): headers for targets that are compiled with the options of this folder alone,
# as the compiler demands. To others, in options or language, it is of no use.
function(sluice_pch name)
  if(NOT SLUICE_PCH)
    return()
  endif()
  # CMake precompiles for a target, and a target has a source.
  set(source ${CMAKE_BINARY_DIR}/pch/empty.cc)
  if(NOT EXISTS ${source})
    file(WRITE ${source} "")
  endif()
  add_library(${name} OBJECT ${source})
  target_precompile_headers(${name} PRIVATE ${ARGN})
endfunction()

# sluice_use_pch(TARGET NAME): TARGET takes its headers from there, or, with SLUICE_PCH off, parses them.
function(sluice_use_pch target name)
  if(SLUICE_PCH)
    target_precompile_headers(${target} REUSE_FROM ${name})
    # Without -fpch-preprocess ccache has the headers preprocessed again at every miss. And with a
    # precompiled <string> g++ 12 reports overflows that are not there, where a literal is assigned: with
    # SLUICE_PCH=OFF it still looks for real ones.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess -Wno-stringop-overflow -Wno-array-bounds>)
  endif()
endfunction()

set(SLUICE_PCH_HEADERS
  <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <functional> <iostream> <limits> <map>
  <memory> <numeric> <optional> <set> <sstream> <string> <string_view> <thread> <tuple> <unordered_map>
  <utility> <vector>
  <absl/status/status.h> <absl/status/statusor.h> <absl/strings/match.h> <absl/strings/numbers.h>
  <absl/strings/str_cat.h> <absl/synchronization/mutex.h> <absl/time/clock.h> <absl/time/time.h>
  <absl/types/span.h>)
sluice_pch(sluice_pch ${SLUICE_PCH_HEADERS})
sluice_pch(sluice_json_pch ${SLUICE_PCH_HEADERS} <nlohmann/json.hpp>)
sluice_pch(sluice_grpc_pch ${SLUICE_PCH_HEADERS} <grpcpp/grpcpp.h> <google/protobuf/message.h>)
