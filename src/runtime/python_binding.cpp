// The Python module `identity_conv_runtime`: identity_conv::Package as a Python class. This file
// alone includes Python.h. Plain CPython calls, because a call through pybind or torchbind costs
// more than a small model.

#include <torch/csrc/autograd/python_variable.h>

#include <c10/core/DeviceType.h>

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "error_text.h"
#include "identity_conv/package.h"

namespace {

using identity_conv::Package;
using identity_conv::PackageError;

PyObject* package_error = nullptr;

// An owned reference.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// The body of a method: null with a Python exception set where it throws.
template <class Body>
PyObject* translating_exceptions(Body&& body) {
  try {
    return body();
  } catch (const PackageError& error) {
    const bool no_file = error.kind() == PackageError::Kind::kNoSuchFile;
    PyErr_SetString(no_file ? PyExc_FileNotFoundError : package_error, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, identity_conv::error_text(error).c_str());
  }
  return nullptr;
}

struct PyPackage {
  PyObject_HEAD
      // Shared with the calls under way, so that close() in one thread leaves those in others
      // alone.
      std::shared_ptr<Package>
          package;
};

std::shared_ptr<Package> open_package(PyObject* self) {
  std::shared_ptr<Package> package = reinterpret_cast<PyPackage*>(self)->package;
  if (!package) PyErr_SetString(PyExc_ValueError, "the package is closed");
  return package;
}

PyObject* package_open(PyObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"path", "device_index", "num_runners", nullptr};
  PyObject* path_bytes = nullptr;
  int device_index = -1;
  Py_ssize_t num_runners = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|in:open", const_cast<char**>(names),
                                   PyUnicode_FSConverter, &path_bytes, &device_index,
                                   &num_runners)) {
    return nullptr;
  }
  const Ref path(path_bytes);
  if (num_runners < 1) {
    return PyErr_Format(PyExc_ValueError, "num_runners must be at least 1, got %zd", num_runners);
  }
  if (device_index < -1 || device_index > 127) {
    return PyErr_Format(PyExc_ValueError, "device_index must be -1 to 127, got %d", device_index);
  }

  return translating_exceptions([&]() -> PyObject* {
    const std::string file = PyBytes_AS_STRING(path.get());
    Package::Options options;
    options.device_index = static_cast<c10::DeviceIndex>(device_index);
    options.num_runners = static_cast<std::size_t>(num_runners);
    std::shared_ptr<Package> package = [&] {
      const WithoutGil released;
      return std::make_shared<Package>(Package::open(file, options));
    }();

    auto* python_type = reinterpret_cast<PyTypeObject*>(type);
    PyObject* self = python_type->tp_alloc(python_type, 0);
    if (!self) return nullptr;
    new (&reinterpret_cast<PyPackage*>(self)->package) std::shared_ptr<Package>(std::move(package));
    return self;
  });
}

// Destroying a package unmaps code and removes files: not under the GIL.
void drop_package(PyObject* self) {
  std::shared_ptr<Package> package = std::move(reinterpret_cast<PyPackage*>(self)->package);
  const WithoutGil released;
  package.reset();
}

void package_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  drop_package(self);
  reinterpret_cast<PyPackage*>(self)->package.~shared_ptr<Package>();
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* wrap_all(std::vector<at::Tensor>&& tensors) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!tuple) return nullptr;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = THPVariable_Wrap(std::move(tensors[i]));
    if (!tensor) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), tensor);
  }
  return tuple.release();
}

PyObject* package_run(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;

    std::vector<at::Tensor> inputs;
    inputs.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!THPVariable_Check(args[i])) {
        return PyErr_Format(PyExc_TypeError, "input %zd must be a torch.Tensor, got %.200s", i,
                            Py_TYPE(args[i])->tp_name);
      }
      inputs.push_back(THPVariable_Unpack(args[i]));
    }
    std::vector<at::Tensor> outputs = [&] {
      const WithoutGil released;
      return package->run(std::move(inputs));
    }();
    return wrap_all(std::move(outputs));
  });
}

PyObject* package_call_spec(PyObject* self, void*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    const identity_conv::CallSpec spec = package->call_spec();
    return Py_BuildValue("(ss)", spec.inputs.c_str(), spec.outputs.c_str());
  });
}

PyObject* package_manifest(PyObject* self, void*) {
  const std::shared_ptr<Package> package = open_package(self);
  return package ? PyUnicode_FromString(package->manifest().c_str()) : nullptr;
}

PyObject* package_close(PyObject* self, PyObject*) {
  drop_package(self);
  Py_RETURN_NONE;
}

PyObject* package_device(PyObject* self, void*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    return PyUnicode_FromString(package->device().str().c_str());
  });
}

PyObject* package_num_inputs(PyObject* self, void*) {
  const std::shared_ptr<Package> package = open_package(self);
  return package ? PyLong_FromSize_t(package->num_inputs()) : nullptr;
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef package_methods[] = {
    {"open", as_method(package_open), METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "open(path, device_index=-1, num_runners=1)\n--\n\n"
     "Load a package; its operator libraries must be loaded before.\n\n"
     "Raises FileNotFoundError, or PackageError with one sentence."},
    {"run", as_method(package_run), METH_FASTCALL,
     "run(*tensors)\n--\n\n"
     "Run the model on the tensors of its flattened arguments; returns a tuple of tensors.\n\n"
     "Inputs that require grad are run without it. Raises TypeError for an input that is no\n"
     "tensor, PackageError for one that the model was not compiled for, or where the model fails."},
    {"close", package_close, METH_NOARGS,
     "close()\n--\n\nUnload the model, after the calls under way; closing twice does nothing."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef package_properties[] = {
    {"call_spec", package_call_spec, nullptr,
     "The pytree specs of the arguments and of the result, as two JSON strings.", nullptr},
    {"device", package_device, nullptr, "Where the model is loaded, such as 'cpu' or 'cuda:0'.",
     nullptr},
    {"manifest", package_manifest, nullptr, "The manifest's JSON; empty without one.", nullptr},
    {"num_inputs", package_num_inputs, nullptr, "How many tensors run() takes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot package_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(package_dealloc)},
    {Py_tp_methods, package_methods},
    {Py_tp_getset, package_properties},
    {Py_tp_doc, const_cast<char*>("A model loaded from its compiled package; made by open().")},
    {0, nullptr}};

PyType_Spec package_spec = {"identity_conv_runtime.Package", sizeof(PyPackage), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, package_slots};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "identity_conv_runtime",
                                 "Compiled packages, run by the C++ runtime.",
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_identity_conv_runtime() {
  Ref module(PyModule_Create(&module_definition));
  if (!module) return nullptr;
  Ref error(
      PyErr_NewExceptionWithDoc("identity_conv_runtime.PackageError",
                                "A package, or an input of one, was refused, or its model failed.",
                                PyExc_RuntimeError, nullptr));
  Ref type(PyType_FromSpec(&package_spec));
  if (!error || !type || PyModule_AddObjectRef(module.get(), "PackageError", error.get()) < 0 ||
      PyModule_AddObjectRef(module.get(), "Package", type.get()) < 0) {
    return nullptr;
  }
  package_error = error.release();
  return module.release();
}
