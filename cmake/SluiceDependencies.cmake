# Every library that Sluice takes from the system, found once. tools/setup installs them all.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # With precompiled headers (SluicePch.cmake) ccache caches only what it is told may ignore macros that
  # such a header defines but no file uses, and __TIME__.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
      ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)  # before gRPC, in module mode: it brings protobuf_generate
find_package(gRPC CONFIG REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(yaml-cpp CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(cppzmq CONFIG REQUIRED)
find_package(msgpack CONFIG REQUIRED)
find_package(Boost 1.74 REQUIRED)
find_package(Eigen3 3.4 REQUIRED NO_MODULE)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(isal REQUIRED IMPORTED_TARGET libisal)
if(SLUICE_JEMALLOC)
  pkg_check_modules(jemalloc REQUIRED IMPORTED_TARGET jemalloc)
endif()
if(SLUICE_TESTS)
  find_package(Catch2 2 CONFIG REQUIRED)
  include(Catch)
endif()

# The google.rpc error protos are in no Debian package; tools/setup puts them into the venv.
file(GLOB SLUICE_GOOGLEAPIS_CANDIDATES
     ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/google/rpc/error_details.proto)
if(NOT SLUICE_GOOGLEAPIS_CANDIDATES)
  message(FATAL_ERROR
    "google/rpc/error_details.proto is not in .venv: run tools/setup, which installs it and everything else")
endif()
list(GET SLUICE_GOOGLEAPIS_CANDIDATES 0 SLUICE_GOOGLEAPIS_DIR)
get_filename_component(SLUICE_GOOGLEAPIS_DIR ${SLUICE_GOOGLEAPIS_DIR}/../../.. ABSOLUTE)
