// A field of a type that can't be carried: it doesn't compile, and says why.
#include <identity_conv/state.h>

struct Bad : torch::CustomClassHolder {
  static auto state() { return identity_conv::state(IDENTITY_CONV_FIELD(Bad, ratio)); }
  float ratio = 0;
};
TORCH_LIBRARY(test_bad_field, m) { identity_conv::class_<Bad>(m, "Bad"); }
