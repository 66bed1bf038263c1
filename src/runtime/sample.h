// The example that a package carries: inputs, and the outputs that the exported program gave.
//
//   "sample": {"inputs":  [{"dtype": "float32", "sizes": [2, 3], "strides": [3, 1], "bytes": 24}],
//              "outputs": [{"dtype": "float32", ..., "rtol": 1.3e-6, "atol": 1e-5}, null]}
//
// Each tensor's bytes follow the one before in the records data/identity_conv/sample/inputs and
// .../outputs, from its first element to its last. An output without a tolerance must be equal;
// null is one that isn't compared, as None.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "archive.h"
#include "json.h"

namespace identity_conv {

struct Sample {
  struct Output {
    at::Tensor value;  // undefined where it isn't compared
    double rtol = 0;
    double atol = 0;
  };
  std::vector<at::Tensor> inputs;
  std::vector<Output> outputs;
};

// None where the manifest has no sample. Throws std::invalid_argument where it doesn't say what it
// must, or names bytes that the records lack, and what reading the archive throws.
std::optional<Sample> read_sample(const PackageArchive& archive, const Json& manifest,
                                  c10::Device device);

// How `outputs` differ from the recorded ones, as one clause; empty where they agree.
std::string difference(const Sample& sample, const std::vector<at::Tensor>& outputs);

}  // namespace identity_conv
