#include "causal_conv1d_kernels.cuh"

template struct causal_conv1d::Launcher<causal_conv1d::Dtype::kHalf>;
