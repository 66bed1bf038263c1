// Operators called as from a new thread, whatever the caller's thread has switched on.

#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace identity_conv {

// While this lives, no mode of the thread takes part in the operators that it calls: neither
// Python's dispatch modes (fake tensors among them), nor autocast, functorch's transforms or
// tracing. Compiled code reads and writes memory that it takes for that of plain tensors, of the
// dtypes that it was compiled for.
class PlainDispatch {
 public:
  PlainDispatch() : without_(kModes) {}

 private:
  static constexpr c10::DispatchKeySet kModes =
      c10::python_ks | c10::autocast_dispatch_keyset | c10::functorch_transforms_ks |
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                           c10::DispatchKey::Functionalize, c10::DispatchKey::PreDispatch,
                           c10::DispatchKey::PythonDispatcher, c10::DispatchKey::Tracer});

  c10::impl::ExcludeDispatchKeyGuard without_;
};

}  // namespace identity_conv
