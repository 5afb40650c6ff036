# dependencies.cmake -- where each outside library comes from: an installed package first, else a pinned release by its SHA-256.
include(FetchContent)
set(THREADS_PREFER_PTHREAD_FLAG ON)

# Stops with the one line that helps: what is missing and which package brings it.
function(moetrain_must_have found what package)
  if(NOT found)
    message(FATAL_ERROR "${what} was not found. On Debian or Ubuntu: apt-get install ${package} (scripts/install.sh installs all that is missing)")
  endif()
endfunction()

# moetrain_dependency(PACKAGE ... URL ... SHA256 ... APT ... TARGETS ...): find_package, else fetch. Warnings inside fetched headers are
# not ours, so their include folders become system ones.
macro(moetrain_dependency package)
  cmake_parse_arguments(wanted "" "URL;SHA256;APT" "TARGETS" ${ARGN})
  if(MOETRAIN_SYSTEM_DEPENDENCIES)
    find_package(${package} QUIET)
  endif()
  if(${package}_FOUND)
    message(STATUS "${package}: installed, ${${package}_VERSION}")
  else()
    message(STATUS "${package}: not installed (package ${wanted_APT}); fetching ${wanted_URL}")
    FetchContent_Declare(${package} URL ${wanted_URL} URL_HASH SHA256=${wanted_SHA256} DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
    FetchContent_MakeAvailable(${package})
    foreach(target ${wanted_TARGETS})
      get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
      set_target_properties(${target} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${folders}")
    endforeach()
  endif()
endmacro()

# ---- compiled against what the system has: these carry the machine's own tuning and drivers, so they are never fetched
find_package(Threads REQUIRED)
find_package(OpenMP QUIET COMPONENTS CXX)
moetrain_must_have("${OpenMP_CXX_FOUND}" "OpenMP" "g++")
find_package(MPI QUIET COMPONENTS C)
moetrain_must_have("${MPI_C_FOUND}" "MPI" "libopenmpi-dev openmpi-bin")
find_package(HDF5 QUIET COMPONENTS C)
moetrain_must_have("${HDF5_FOUND}" "HDF5" "libhdf5-dev")
find_package(ZLIB QUIET)
moetrain_must_have("${ZLIB_FOUND}" "zlib" "zlib1g-dev")

set(BLA_VENDOR OpenBLAS)
find_package(BLAS QUIET)
if(NOT BLAS_FOUND)
  unset(BLA_VENDOR)
  find_package(BLAS QUIET)
endif()
moetrain_must_have("${BLAS_FOUND}" "BLAS" "libopenblas-dev")
find_path(MOETRAIN_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas openblas-pthread)
mark_as_advanced(MOETRAIN_CBLAS_INCLUDE)
moetrain_must_have("${MOETRAIN_CBLAS_INCLUDE}" "cblas.h" "libopenblas-dev")
add_library(moetrain_blas INTERFACE)
target_include_directories(moetrain_blas SYSTEM INTERFACE ${MOETRAIN_CBLAS_INCLUDE})
target_link_libraries(moetrain_blas INTERFACE BLAS::BLAS)

# ---- small enough to be built along
set(SPDLOG_SYSTEM_INCLUDES ON)
set(YAML_CPP_BUILD_TESTS OFF)
set(YAML_CPP_BUILD_TOOLS OFF)
set(YAML_CPP_INSTALL OFF)
set(YAML_BUILD_SHARED_LIBS OFF)
set(JSON_BuildTests OFF)
set(CLI11_BUILD_TESTS OFF)
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)       # the lines above are obeyed as options
set(CMAKE_POLICY_VERSION_MINIMUM 3.5)       # yaml-cpp 0.8 asks for less than CMake 4 accepts
moetrain_dependency(spdlog APT libspdlog-dev TARGETS spdlog
  URL https://github.com/gabime/spdlog/archive/refs/tags/v1.12.0.tar.gz
  SHA256 4dccf2d10f410c1e2feaff89966bfc49a1abb29ef6f08246335b110e001e09a9)
moetrain_dependency(CLI11 APT libcli11-dev TARGETS CLI11
  URL https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.4.2.tar.gz
  SHA256 f2d893a65c3b1324c50d4e682c0cdc021dd0477ae2c048544f39eed6654b699a)
moetrain_dependency(nlohmann_json APT nlohmann-json3-dev TARGETS nlohmann_json
  URL https://github.com/nlohmann/json/archive/refs/tags/v3.11.3.tar.gz
  SHA256 0d8ef5af7f9794e3263480193c491549b2ba6cc74bb018906202ada498a79406)
moetrain_dependency(yaml-cpp APT libyaml-cpp-dev TARGETS yaml-cpp
  URL https://github.com/jbeder/yaml-cpp/archive/refs/tags/0.8.0.tar.gz
  SHA256 fbe74bbdcee21d656715688706da3c8becfd946d92cd44705cc6098bb23b3a16)
if(MOETRAIN_TESTS)  # 2.13 (Debian 12) or 3
  moetrain_dependency(Catch2 APT catch2 TARGETS Catch2
    URL https://github.com/catchorg/Catch2/archive/refs/tags/v3.5.2.tar.gz
    SHA256 269543a49eb76f40b3f93ff231d4c24c27a7e16c90e47d2e45bcc564de470c6e)
endif()
if(NOT TARGET yaml-cpp::yaml-cpp)  # the name came with 0.8
  add_library(yaml-cpp::yaml-cpp ALIAS yaml-cpp)
endif()

# What the rooms link: the shared libraries, or with MOETRAIN_STATIC the same code inside the binary. Distributions ship no spdlog or
# fmt archives, so those two are then compiled from their headers.
add_library(moetrain_log INTERFACE)
add_library(moetrain_yaml INTERFACE)
if(MOETRAIN_STATIC AND spdlog_FOUND)
  target_compile_definitions(moetrain_log INTERFACE SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY=1)
  target_link_libraries(moetrain_log INTERFACE Threads::Threads)
else()
  target_link_libraries(moetrain_log INTERFACE spdlog::spdlog)
endif()
if(MOETRAIN_STATIC AND yaml-cpp_FOUND)
  find_library(MOETRAIN_YAML_ARCHIVE libyaml-cpp.a)
  moetrain_must_have("${MOETRAIN_YAML_ARCHIVE}" "libyaml-cpp.a" "libyaml-cpp-dev")
  target_link_libraries(moetrain_yaml INTERFACE ${MOETRAIN_YAML_ARCHIVE})
else()
  target_link_libraries(moetrain_yaml INTERFACE yaml-cpp::yaml-cpp)
endif()

# ---- CUDA and NCCL
set(MOETRAIN_WITH_CUDA OFF)
set(MOETRAIN_CUDA_SUMMARY "off")
set(MOETRAIN_NCCL_SUMMARY "not looked for")
set(MOETRAIN_NCCL_VERSION "")
if(NOT MOETRAIN_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(MOETRAIN_NVCC nvcc PATHS /usr/local/cuda/bin)
    mark_as_advanced(MOETRAIN_NVCC)
    if(MOETRAIN_NVCC)
      set(ENV{CUDACXX} ${MOETRAIN_NVCC})
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures; 90a is Hopper with its wgmma and TMA instructions")
  endif()
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY $<IF:$<BOOL:${MOETRAIN_STATIC}>,Static,Shared>)  # one runtime: the one memory/ links
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 (Debian 12) has not heard of it; nvcc has since 12.0
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)  # set before enable_language, it would fail CMake's own check of the compiler
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    set(MOETRAIN_WITH_CUDA ON)
    set(MOETRAIN_CUDA_SUMMARY "${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(MOETRAIN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOETRAIN_CUDA=ON, but no working nvcc: not on PATH, not in CUDACXX, not in /usr/local/cuda/bin")
  else()
    set(MOETRAIN_CUDA_SUMMARY "off (no working nvcc)")
  endif()
endif()
if(MOETRAIN_WITH_CUDA)
  find_path(MOETRAIN_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(MOETRAIN_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR})
  mark_as_advanced(MOETRAIN_NCCL_INCLUDE MOETRAIN_NCCL_LIBRARY)
  set(MOETRAIN_NCCL_SUMMARY "not found")
  if(MOETRAIN_NCCL_INCLUDE AND MOETRAIN_NCCL_LIBRARY)
    file(STRINGS ${MOETRAIN_NCCL_INCLUDE}/nccl.h nccl_numbers REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
    string(REGEX MATCHALL "[0-9]+" nccl_numbers "${nccl_numbers}")
    list(JOIN nccl_numbers "." MOETRAIN_NCCL_VERSION)
    set(MOETRAIN_NCCL_SUMMARY "${MOETRAIN_NCCL_VERSION}, ${MOETRAIN_NCCL_LIBRARY}")
  endif()
endif()
