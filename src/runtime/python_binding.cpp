// The Python module `identity_conv_runtime`: identity_conv::Package as a Python class. This file
// alone includes Python.h. Plain CPython calls, because a call through pybind or torchbind costs
// more than a small model.

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <c10/core/DeviceType.h>

#include <chrono>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "error_text.h"
#include "identity_conv/package.h"
#include "libraries.h"

namespace {

using identity_conv::Package;
using identity_conv::PackageError;

// The Python exception of each PackageError::Kind, in its order; set by set_errors().
PyObject* error_types = nullptr;

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

// Names in a damaged file may be no UTF-8.
PyObject* as_text(const std::string& text) {
  return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

// The body of a method: null with a Python exception set where it throws.
template <class Body>
PyObject* translating_exceptions(Body&& body) {
  try {
    return body();
  } catch (const PackageError& error) {
    const auto kind = static_cast<Py_ssize_t>(error.kind());
    PyObject* type = error_types ? PyTuple_GetItem(error_types, kind) : PyExc_RuntimeError;
    const Ref text(as_text(error.what()));
    if (type && text) PyErr_SetObject(type, text.get());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
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
  // Whether the user is yet to be told where calls run without the CUDA graph that was asked for.
  bool tells_of_fallback;
};

std::shared_ptr<Package> open_package(PyObject* self) {
  std::shared_ptr<Package> package = reinterpret_cast<PyPackage*>(self)->package;
  if (!package) PyErr_SetString(PyExc_ValueError, "the package is closed");
  return package;
}

struct OpenArguments {
  std::string path;
  Package::Options options;
};

// False with a Python exception set where the arguments don't fit.
bool parse_open(PyObject* args, PyObject* kwargs, const char* format, OpenArguments& parsed) {
  static const char* names[] = {"path",       "device",          "num_runners",
                                "cuda_graph", "expected_sha256", nullptr};
  PyObject* path_bytes = nullptr;
  const char* device = nullptr;
  Py_ssize_t num_runners = 1;
  int cuda_graph = 0;
  const char* expected_sha256 = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, const_cast<char**>(names),
                                   PyUnicode_FSConverter, &path_bytes, &device, &num_runners,
                                   &cuda_graph, &expected_sha256)) {
    return false;
  }
  const Ref path(path_bytes);
  parsed.path = PyBytes_AS_STRING(path.get());
  if (device) parsed.options.device = c10::Device(device);
  // A negative number becomes a large one, which is refused as well.
  parsed.options.num_runners = static_cast<std::size_t>(num_runners);
  parsed.options.cuda_graph = static_cast<identity_conv::CudaGraph>(cuda_graph);
  if (expected_sha256) parsed.options.expected_sha256 = expected_sha256;
  return true;
}

PyObject* package_open(PyObject* type, PyObject* args, PyObject* kwargs) {
  return translating_exceptions([&]() -> PyObject* {
    OpenArguments arguments;
    if (!parse_open(args, kwargs, "O&|zniz:open", arguments)) return nullptr;
    std::shared_ptr<Package> package = [&] {
      const WithoutGil released;
      return std::make_shared<Package>(Package::open(arguments.path, arguments.options));
    }();

    auto* python_type = reinterpret_cast<PyTypeObject*>(type);
    PyObject* self = python_type->tp_alloc(python_type, 0);
    if (!self) return nullptr;
    auto* opened = reinterpret_cast<PyPackage*>(self);
    new (&opened->package) std::shared_ptr<Package>(std::move(package));
    opened->tells_of_fallback = arguments.options.cuda_graph != identity_conv::CudaGraph::kOff;
    return self;
  });
}

PyObject* package_inspect(PyObject*, PyObject* args, PyObject* kwargs) {
  return translating_exceptions([&]() -> PyObject* {
    OpenArguments arguments;
    if (!parse_open(args, kwargs, "O&|zniz:inspect", arguments)) return nullptr;
    const std::string found = [&] {
      const WithoutGil released;
      return Package::inspect(arguments.path, arguments.options);
    }();
    return as_text(found);
  });
}

PyObject* package_verify(PyObject* self, PyObject*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    const std::string sentence = [&] {
      const WithoutGil released;
      return package->verify();
    }();
    return as_text(sentence);
  });
}

// The texts of the findings that are warnings.
PyObject* package_warnings(PyObject* self, void*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    Ref list(PyList_New(0));
    if (!list) return nullptr;
    for (const identity_conv::Finding& finding : package->findings()) {
      if (finding.verdict != identity_conv::Finding::Verdict::kWarning) continue;
      const Ref text(as_text(finding.text));
      if (!text || PyList_Append(list.get(), text.get()) < 0) return nullptr;
    }
    return list.release();
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

// A call under way has what this waits for, and may need the GIL.
std::string cuda_graph_fallback(const Package& package) {
  const WithoutGil released;
  return package.cuda_graph_fallback();
}

// False, with an exception set, where the user has made the warning an error.
bool tell_of_fallback(PyPackage* self, const Package& package) {
  const std::string reason = cuda_graph_fallback(package);
  if (reason.empty()) return true;
  self->tells_of_fallback = false;
  const std::string text = "runs without a CUDA graph: " + reason;
  return PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0;
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
      return package->run(inputs);
    }();
    auto* python_package = reinterpret_cast<PyPackage*>(self);
    if (python_package->tells_of_fallback && !tell_of_fallback(python_package, *package)) {
      return nullptr;
    }
    return wrap_all(std::move(outputs));
  });
}

PyObject* package_cuda_graph_fallback(PyObject* self, void*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    return package ? PyUnicode_FromString(cuda_graph_fallback(*package).c_str()) : nullptr;
  });
}

PyObject* package_constant_names(PyObject* self, void*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    const std::vector<std::string> names = [&] {
      const WithoutGil released;
      return package->constant_names();
    }();
    Ref list(PyList_New(static_cast<Py_ssize_t>(names.size())));
    for (std::size_t i = 0; list && i < names.size(); ++i) {
      PyObject* name = PyUnicode_FromString(names[i].c_str());
      if (!name) return nullptr;
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), name);
    }
    return list.release();
  });
}

PyObject* package_constants(PyObject* self, PyObject*) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    identity_conv::ConstantMap constants = [&] {
      const WithoutGil released;
      return package->constants();
    }();
    Ref dict(PyDict_New());
    for (auto& [name, value] : constants) {
      const Ref tensor(THPVariable_Wrap(std::move(value)));
      if (!dict || !tensor || PyDict_SetItemString(dict.get(), name.c_str(), tensor.get()) < 0) {
        return nullptr;
      }
    }
    return dict.release();
  });
}

PyObject* package_load_constants(PyObject* self, PyObject* dict) {
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    if (!PyDict_Check(dict)) {
      return PyErr_Format(PyExc_TypeError, "constants must be a dict, got %.200s",
                          Py_TYPE(dict)->tp_name);
    }
    identity_conv::ConstantMap replacements;
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &i, &name, &value);) {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &length) : nullptr;
      if (!text || !THPVariable_Check(value)) {
        if (PyErr_Occurred()) return nullptr;
        return PyErr_Format(PyExc_TypeError,
                            "constants must map names to tensors, got %.200s for %R",
                            Py_TYPE(value)->tp_name, name);
      }
      replacements.emplace(std::string(text, static_cast<std::size_t>(length)),
                           THPVariable_Unpack(value));
    }
    {
      const WithoutGil released;
      package->load_constants(replacements);
    }
    Py_RETURN_NONE;
  });
}

// Seconds a call in a loop in C++: of the package, or of torch's loader on the file at `path`.
PyObject* package_time_calls(PyObject* self, PyObject* args) {
  const char* path = nullptr;
  int count = 0;
  PyObject* tensor = nullptr;
  if (!PyArg_ParseTuple(args, "ziO!", &path, &count, THPVariableClass, &tensor)) return nullptr;
  return translating_exceptions([&]() -> PyObject* {
    const std::shared_ptr<Package> package = open_package(self);
    if (!package) return nullptr;
    const std::vector<at::Tensor> inputs = {THPVariable_Unpack(tensor)};
    const double seconds = [&] {
      const WithoutGil released;
      std::optional<torch::inductor::AOTIModelPackageLoader> loader;
      if (path) loader.emplace(path);
      const auto call = [&] { loader ? loader->run(inputs) : package->run(inputs); };
      call();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < count; ++i) call();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }();
    return PyFloat_FromDouble(seconds / count);
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
  return package ? as_text(package->manifest()) : nullptr;
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
     "open(path, device=None, num_runners=1, cuda_graph=0, expected_sha256=None)\n--\n\n"
     "Load a package, and the operator libraries in it.\n\n"
     "Raises what set_errors() was given, with one sentence."},
    {"inspect", as_method(package_inspect), METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     "inspect(path, device=None, num_runners=1, cuda_graph=0, expected_sha256=None)\n--\n\n"
     "The manifest, the records' sizes and what open() would find, as JSON; maps nothing."},
    {"verify", package_verify, METH_NOARGS,
     "verify()\n--\n\nRun the recorded example and compare; returns a sentence."},
    {"run", as_method(package_run), METH_FASTCALL,
     "run(*tensors)\n--\n\n"
     "Run the model on the tensors of its flattened arguments; returns a tuple of tensors.\n\n"
     "Inputs that require grad are run without it. Raises TypeError for an input that is no\n"
     "tensor, PackageError for one that the model was not compiled for, or where the model fails."},
    {"constants", package_constants, METH_NOARGS,
     "constants()\n--\n\nCopies of the model's constants, by name."},
    {"load_constants", package_load_constants, METH_O,
     "load_constants(constants)\n--\n\n"
     "Replace constants by name, for all calls at once; raises PackageError and changes nothing\n"
     "where one doesn't fit."},
    {"time_calls", package_time_calls, METH_VARARGS,
     "time_calls(path, count, tensor)\n--\n\n"
     "Seconds a call in C++, for the bench: of the package, or with a path of torch's loader on "
     "it."},
    {"close", package_close, METH_NOARGS,
     "close()\n--\n\nUnload the model, after the calls under way; closing twice does nothing."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef package_properties[] = {
    {"call_spec", package_call_spec, nullptr,
     "The pytree specs of the arguments and of the result, as two JSON strings.", nullptr},
    {"constant_names", package_constant_names, nullptr, "The names of the constants, sorted.",
     nullptr},
    {"cuda_graph_fallback", package_cuda_graph_fallback, nullptr,
     "Why calls run without the CUDA graph that was asked for; empty while none did.", nullptr},
    {"device", package_device, nullptr, "Where the model is loaded, such as 'cpu' or 'cuda:0'.",
     nullptr},
    {"manifest", package_manifest, nullptr, "The manifest's JSON; empty without one.", nullptr},
    {"warnings", package_warnings, nullptr, "What was found before loading and isn't fatal.",
     nullptr},
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

PyObject* set_errors(PyObject*, PyObject* types) {
  if (!PyTuple_Check(types))
    return PyErr_Format(PyExc_TypeError, "a tuple of exceptions is needed");
  Py_XSETREF(error_types, Py_NewRef(types));
  Py_RETURN_NONE;
}

PyObject* describe_code(PyObject*, PyObject* path) {
  return translating_exceptions([&]() -> PyObject* {
    PyObject* bytes = nullptr;
    if (!PyUnicode_FSConverter(path, &bytes)) return nullptr;
    const Ref owned(bytes);
    return as_text(identity_conv::describe_code(PyBytes_AS_STRING(bytes)));
  });
}

PyObject* schema_of_operator(PyObject*, PyObject* name) {
  return translating_exceptions([&]() -> PyObject* {
    const char* text = PyUnicode_AsUTF8(name);
    return text ? as_text(identity_conv::operator_schema(text)) : nullptr;
  });
}

PyObject* schemas_of_class(PyObject*, PyObject* name) {
  return translating_exceptions([&]() -> PyObject* {
    const char* text = PyUnicode_AsUTF8(name);
    if (!text) return nullptr;
    Ref list(PyList_New(0));
    if (!list) return nullptr;
    for (const std::string& schema : identity_conv::class_schemas(text)) {
      const Ref item(as_text(schema));
      if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
  });
}

PyObject* loaded_libraries(PyObject*, PyObject*) {
  return translating_exceptions([&]() -> PyObject* {
    Ref set(PySet_New(nullptr));
    if (!set) return nullptr;
    for (const std::string& digest : identity_conv::loaded_libraries()) {
      const Ref item(as_text(digest));
      if (!item || PySet_Add(set.get(), item.get()) < 0) return nullptr;
    }
    return set.release();
  });
}

PyMethodDef module_functions[] = {
    {"set_errors", set_errors, METH_O,
     "set_errors(types)\n--\n\nThe exceptions of PackageError's kinds, a tuple in their order."},
    {"describe_code", describe_code, METH_O,
     "describe_code(path)\n--\n\nWhat a shared library says of itself, as JSON; it isn't mapped."},
    {"loaded_libraries", loaded_libraries, METH_NOARGS,
     "loaded_libraries()\n--\n\nThe SHA-256 of each library loaded out of a package."},
    {"operator_schema", schema_of_operator, METH_O,
     "operator_schema(name)\n--\n\nA registered operator's schema; empty where there is none."},
    {"class_schemas", schemas_of_class, METH_O,
     "class_schemas(name)\n--\n\nThe schemas of a registered class's methods; none where there is "
     "none."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                 "identity_conv_runtime",
                                 "Compiled packages, run by the C++ runtime.",
                                 -1,
                                 module_functions,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_identity_conv_runtime() {
  Ref module(PyModule_Create(&module_definition));
  if (!module) return nullptr;
  Ref type(PyType_FromSpec(&package_spec));
  if (!type || PyModule_AddObjectRef(module.get(), "Package", type.get()) < 0) return nullptr;
  return module.release();
}
