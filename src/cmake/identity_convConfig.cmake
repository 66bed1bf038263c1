# identity_conv::runtime, and torch under it: pass torch's CMAKE_PREFIX_PATH beside this one.
cmake_minimum_required(VERSION 3.21)
if(NOT TARGET identity_conv::torch)
  include("${CMAKE_CURRENT_LIST_DIR}/torch.cmake")
endif()
find_package(CUDAToolkit QUIET) # for a runtime that was built with CUDA
include("${CMAKE_CURRENT_LIST_DIR}/targets.cmake")
