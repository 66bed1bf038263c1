# Finds torch and defines identity_conv::torch_headers and identity_conv::torch, for this project's own
# build and, installed beside its targets, for a consumer's.
#
# Not by find_package(Torch): with a CUDA torch that looks for a whole CUDA toolkit, which a machine
# that only runs packages doesn't have. Headers and three libraries of torch's folder are enough.

unset(TORCH_CMAKE_DIR CACHE) # follow a changed CMAKE_PREFIX_PATH
find_path(TORCH_CMAKE_DIR TorchConfig.cmake
  HINTS ${Torch_DIR} ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH
  PATH_SUFFIXES Torch share/cmake/Torch)
if(NOT TORCH_CMAKE_DIR)
  message(FATAL_ERROR "torch was not found: pass -DCMAKE_PREFIX_PATH=\"$(python -c "
    "'import torch; print(torch.utils.cmake_prefix_path)')\"")
endif()
get_filename_component(TORCH_ROOT "${TORCH_CMAKE_DIR}/../../.." ABSOLUTE)
set(TORCH_LIB "${TORCH_ROOT}/lib")

add_library(identity_conv::torch_headers INTERFACE IMPORTED)
target_include_directories(identity_conv::torch_headers SYSTEM INTERFACE
  "${TORCH_ROOT}/include" "${TORCH_ROOT}/include/torch/csrc/api/include")
# Torch's headers need it from 2.13 on; this project's own code is C++17.
target_compile_features(identity_conv::torch_headers INTERFACE cxx_std_20)

# libtorch.so brings CUDA in where torch has it, and nothing refers to it by a symbol: a package
# needs it loaded already.
add_library(identity_conv::torch INTERFACE IMPORTED)
target_link_libraries(identity_conv::torch INTERFACE identity_conv::torch_headers
  -Wl,--no-as-needed "${TORCH_LIB}/libtorch.so" "${TORCH_LIB}/libtorch_cpu.so"
  "${TORCH_LIB}/libc10.so" -Wl,--as-needed)
if(EXISTS "${TORCH_LIB}/libtorch_cuda.so") # for what is built with CUDA graphs
  target_link_libraries(identity_conv::torch INTERFACE
    "${TORCH_LIB}/libtorch_cuda.so" "${TORCH_LIB}/libc10_cuda.so")
endif()

# A compiler installed without libstdc++.so would put a second C++ runtime into each library, beside
# torch's: then the shared one is named.
foreach(file libstdc++.so libstdc++.so.6)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${file}
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${found}")
    if(file STREQUAL libstdc++.so.6)
      target_link_libraries(identity_conv::torch INTERFACE "${found}")
      set(cpp_runtime "${found}")
    endif()
    break()
  endif()
endforeach()
