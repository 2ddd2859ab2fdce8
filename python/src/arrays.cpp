// NumPy and DLPack: see arrays.hpp. A capsule is never consumed, only held: its producer frees the
// memory when the last holder of the capsule goes.

#include "arrays.hpp"

#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dlpack.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

namespace {

[[noreturn]] void refuse(const Argument& argument, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, fmt::format("{}: {} on rank {} {}", argument.call,
                                                       argument.name, argument.rank, what));
}

struct ElementType {
  Element element;
  std::string_view name;
  char kind;  ///< NumPy's letter
  DlCode code;
  int bytes;
};
constexpr ElementType kElements[] = {
    {Element::f32, "float32", 'f', DlCode::real, 4},
    {Element::f16, "float16", 'f', DlCode::real, 2},
    {Element::f64, "float64", 'f', DlCode::real, 8},
    {Element::bf16, "bfloat16", 'V', DlCode::bfloat, 2},
    {Element::i32, "int32", 'i', DlCode::integer, 4},
    {Element::i64, "int64", 'i', DlCode::integer, 8},
    {Element::u16, "uint16", 'u', DlCode::unsigned_integer, 2},
    {Element::u8, "uint8", 'u', DlCode::unsigned_integer, 1},
};

const ElementType* find_element(std::string_view name) {
  for (const ElementType& type : kElements) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

View view_of_numpy(const py::array& array, const Argument& argument) {
  View view;
  view.keep = array;
  view.is_numpy = true;
  view.data = const_cast<void*>(array.data());  // written only where `writable` allows it
  view.writable = array.writeable();
  view.shape.assign(array.shape(), array.shape() + array.ndim());
  view.strides.assign(array.strides(), array.strides() + array.ndim());
  const py::dtype type = array.dtype();
  view.element_name = py::str(type.attr("name"));
  view.element_bytes = type.itemsize();
  if (!type.attr("isnative").cast<bool>()) {
    refuse(argument,
           "has the byte order of another machine; fix: x.astype(x.dtype.newbyteorder('='))");
  }
  // bfloat16 is a type that packages such as ml_dtypes add to NumPy.
  if (const ElementType* const known = find_element(view.element_name)) {
    view.element = known->element;
  }
  return view;
}

View view_of_dlpack(py::handle object, const Argument& argument) {
  py::object capsule;
  try {
    const auto device = object.attr("__dlpack_device__")().cast<py::tuple>();
    const int type = py::int_(device[0]).cast<int>();
    if (type != kDlCpu && type != kDlCudaHost) {
      refuse(argument, fmt::format("is in the memory of a device (DLPack type {}); allowed: host "
                                   "memory; fix: pass {}.cpu()",
                                   type, argument.name));
    }
    capsule = object.attr("__dlpack__")();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    refuse(argument, fmt::format("gave no DLPack capsule ({}); fix: pass {}.detach().contiguous()",
                                 error.what(), argument.name));
  }
  auto* const managed =
      static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  const DlTensor& tensor = managed->tensor;
  View view;
  view.keep = std::move(capsule);
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.writable = true;
  view.element_bytes = tensor.type.bits / 8;
  view.element_name = fmt::format("DLPack type {}, {} bits", tensor.type.code, tensor.type.bits);
  for (const ElementType& type : kElements) {
    if (static_cast<std::uint8_t>(type.code) == tensor.type.code &&
        type.bytes * 8 == tensor.type.bits && tensor.type.lanes == 1) {
      view.element = type.element;
      view.element_name = type.name;
    }
  }
  std::int64_t packed = view.element_bytes;
  view.shape.assign(tensor.shape, tensor.shape + tensor.num_dimensions);
  view.strides.resize(view.shape.size());
  for (std::size_t i = view.shape.size(); i-- > 0;) {
    view.strides[i] = tensor.strides == nullptr ? packed : tensor.strides[i] * view.element_bytes;
    packed *= view.shape[i];
  }
  return view;
}

std::int64_t count_of(const View& view) {
  std::int64_t count = 1;
  for (const std::int64_t size : view.shape) count *= size;
  return count;
}

void check_packed(const View& view, const Argument& argument) {
  std::int64_t packed = view.element_bytes;
  const bool empty = count_of(view) == 0;
  for (std::size_t i = view.shape.size(); i-- > 0;) {
    if (!empty && view.shape[i] != 1 && view.strides[i] != packed) {
      refuse(argument,
             fmt::format("of shape [{}] is not contiguous; fix: {}", fmt::join(view.shape, ", "),
                         view.is_numpy ? fmt::format("np.ascontiguousarray({})", argument.name)
                                       : fmt::format("{}.contiguous()", argument.name)));
    }
    packed *= view.shape[i];
  }
}

std::string packing(const View& view, const Argument& argument) {
  return view.is_numpy ? fmt::format("np.ascontiguousarray({})", argument.name)
                       : fmt::format("{}.contiguous()", argument.name);
}

DType row_type(const View& view, DType dtype, const Argument& argument) {
  switch (view.element) {
    case Element::f32: return DType::f32;
    case Element::f16: return DType::f16;
    case Element::bf16: return DType::bf16;
    case Element::u16:
      if (dtype == DType::bf16) return DType::bf16;
      break;
    case Element::f64:
    case Element::i32:
    case Element::i64:
    case Element::u8:
    case Element::other: break;
  }
  refuse(
      argument,
      fmt::format("has elements of type {}; allowed: {}, the dtype of the exchange; fix: convert "
                  "it{}",
                  view.element_name, to_string(dtype),
                  dtype == DType::bf16 ? " (NumPy has no bf16: give its bits as uint16)" : ""));
}

DType checked_row_type(const View& view, DType dtype, const Argument& argument) {
  const DType found = row_type(view, dtype, argument);
  // Else Ferry's own text says it, but that cannot know how NumPy holds bf16.
  if (found == dtype || !view.is_numpy || dtype != DType::bf16) return found;
  refuse(argument,
         fmt::format("has elements of type {}; allowed: bf16, the dtype of the exchange; fix: "
                     "NumPy has no bf16, so give its bits as uint16, or use dtype='{}'",
                     view.element_name, to_string(found)));
}

struct Rows {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride_bytes;
};

Rows rows_of(const View& view, const Argument& argument) {
  if (view.shape.size() != 2) {
    refuse(argument, fmt::format("has shape [{}]; allowed: two dimensions, rows and hidden; fix: "
                                 "reshape it",
                                 fmt::join(view.shape, ", ")));
  }
  if (view.element_bytes < 1) {
    refuse(argument, fmt::format("has elements of type {}; allowed: float32, bfloat16, float16; "
                                 "fix: convert it",
                                 view.element_name));
  }
  const std::int64_t rows = view.shape[0];
  const std::int64_t columns = view.shape[1];
  const std::int64_t row_bytes = columns * view.element_bytes;
  const bool gaps = columns > 1 && rows > 0 && view.strides[1] != view.element_bytes;
  const bool overlap = rows > 1 && columns > 0 && view.strides[0] < row_bytes;
  const bool odd = reinterpret_cast<std::uintptr_t>(view.data) % view.element_bytes != 0 ||
                   (rows > 1 && view.strides[0] % view.element_bytes != 0);
  if (gaps || overlap || (odd && rows > 0)) {
    refuse(argument,
           fmt::format("of shape [{}] has strides of [{}] bytes; allowed: rows without gaps, at "
                       "least {} bytes apart and aligned to an element; fix: {}",
                       fmt::join(view.shape, ", "), fmt::join(view.strides, ", "), row_bytes,
                       packing(view, argument)));
  }
  return {rows, columns, rows > 1 ? view.strides[0] : row_bytes};
}

/// What a capsule of DLPack or NumPy keeps.
struct Held {
  DlManagedTensor managed;
  std::shared_ptr<const void> owner;
  std::int64_t shape[2];
  std::int64_t strides[2];
};

void free_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;  // who took it frees it
  auto* const managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

py::capsule holder_of(std::shared_ptr<const void> owner) {
  auto* const kept = new std::shared_ptr<const void>(std::move(owner));
  return py::capsule(kept,
                     [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); });
}

}  // namespace

View view_of(py::handle object, const Argument& argument) {
  if (py::isinstance<py::array>(object)) {
    return view_of_numpy(py::reinterpret_borrow<py::array>(object), argument);
  }
  if (py::hasattr(object, "__cuda_array_interface__")) {
    refuse(argument, fmt::format("is in GPU memory; allowed: host memory; fix: pass {}.cpu()",
                                 argument.name));
  }
  if (py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__")) {
    return view_of_dlpack(object, argument);
  }
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const auto numpy = py::module_::import("numpy");
    return view_of_numpy(numpy.attr("frombuffer")(object, "uint8").cast<py::array>(), argument);
  }
  refuse(argument, fmt::format("is a {}; allowed: a NumPy array, or an object with __dlpack__ such "
                               "as a torch tensor; fix: convert it",
                               std::string(py::str(py::type::of(object).attr("__name__")))));
}

ConstMatrix matrix_of(const View& view, DType dtype, const Argument& argument) {
  const Rows rows = rows_of(view, argument);
  return {.data = view.data,
          .dtype = checked_row_type(view, dtype, argument),
          .rows = rows.rows,
          .columns = rows.columns,
          .row_stride_bytes = rows.stride_bytes};
}

Matrix output_of(const View& view, DType dtype, const Argument& argument) {
  const ConstMatrix matrix = matrix_of(view, dtype, argument);
  if (!view.writable) refuse(argument, "must not be written; fix: pass a copy of it");
  return {.data = view.data,
          .dtype = matrix.dtype,
          .rows = matrix.rows,
          .columns = matrix.columns,
          .row_stride_bytes = matrix.row_stride_bytes};
}

std::span<const float> floats_of(const View& view, const Argument& argument) {
  if (view.element != Element::f32) {
    refuse(argument, fmt::format("has elements of type {}; allowed: float32; fix: convert it",
                                 view.element_name));
  }
  check_packed(view, argument);
  return {static_cast<const float*>(view.data), static_cast<std::size_t>(count_of(view))};
}

std::span<float> float_output_of(const View& view, const Argument& argument) {
  const std::span<const float> values = floats_of(view, argument);
  if (!view.writable) refuse(argument, "must not be written; fix: pass a copy of it");
  return {static_cast<float*>(view.data), values.size()};
}

std::span<const std::byte> bytes_of(const View& view, const Argument& argument) {
  check_packed(view, argument);
  return {static_cast<const std::byte*>(view.data),
          static_cast<std::size_t>(count_of(view) * view.element_bytes)};
}

Routing routing_of(const View& ids, const View* weights, const Argument& argument) {
  if (ids.shape.size() != 2) {
    refuse(argument, fmt::format("has shape [{}]; allowed: [num_tokens, num_topk]; fix: reshape it",
                                 fmt::join(ids.shape, ", ")));
  }
  check_packed(ids, argument);
  Routing routing;
  routing.num_tokens = ids.shape[0];
  routing.num_topk = static_cast<int>(std::min<std::int64_t>(ids.shape[1], 1 << 30));
  const auto count = static_cast<std::size_t>(count_of(ids));
  if (ids.element == Element::i32) {
    routing.topk_idx32 = {static_cast<const std::int32_t*>(ids.data), count};
  } else if (ids.element == Element::i64) {
    routing.topk_idx64 = {static_cast<const std::int64_t*>(ids.data), count};
  } else {
    refuse(argument, fmt::format("has elements of type {}; allowed: int32, int64; fix: convert it",
                                 ids.element_name));
  }
  if (weights == nullptr) return routing;
  const Argument of_weights{argument.call, "topk_weights", argument.rank};
  routing.topk_weights = floats_of(*weights, of_weights);
  if (weights->shape != ids.shape) {
    refuse(of_weights, fmt::format("has shape [{}]; allowed: [{}], that of topk_idx; fix: correct "
                                   "one of them",
                                   fmt::join(weights->shape, ", "), fmt::join(ids.shape, ", ")));
  }
  return routing;
}

py::dtype numpy_type(DType dtype) {
  switch (dtype) {
    case DType::f32: return py::dtype("float32");
    case DType::bf16: return py::dtype("uint16");
    case DType::f16: return py::dtype("float16");
  }
  throw Error(ErrorCode::invalid_argument, "dtype: no such element type");
}

py::array numpy_view(const Matrix& matrix, std::shared_ptr<const void> owner) {
  return py::array(numpy_type(matrix.dtype), {matrix.rows, matrix.columns},
                   {matrix.stride_bytes(), static_cast<std::int64_t>(element_bytes(matrix.dtype))},
                   matrix.data, holder_of(std::move(owner)));
}

py::capsule dlpack_view(const Matrix& matrix, std::shared_ptr<const void> owner) {
  auto held = std::make_unique<Held>();
  const auto bytes = static_cast<std::int64_t>(element_bytes(matrix.dtype));
  held->owner = std::move(owner);
  held->shape[0] = matrix.rows;
  held->shape[1] = matrix.columns;
  held->strides[0] = matrix.stride_bytes() / bytes;
  held->strides[1] = 1;
  DlTensor& tensor = held->managed.tensor;
  tensor.data = matrix.data;
  tensor.num_dimensions = 2;
  tensor.type.code =
      static_cast<std::uint8_t>(matrix.dtype == DType::bf16 ? DlCode::bfloat : DlCode::real);
  tensor.type.bits = static_cast<std::uint8_t>(bytes * 8);
  tensor.shape = held->shape;
  tensor.strides = held->strides;
  held->managed.context = held.get();
  held->managed.deleter = [](DlManagedTensor* managed) {
    delete static_cast<Held*>(managed->context);
  };
  py::capsule capsule(&held->managed, "dltensor", &free_unused);
  static_cast<void>(held.release());
  return capsule;
}

template <typename Value>
py::array constant_view(std::span<const Value> values, std::vector<std::int64_t> shape,
                        std::shared_ptr<const void> owner) {
  py::array view(py::dtype::of<Value>(), std::move(shape), values.data(),
                 holder_of(std::move(owner)));
  view.attr("flags").attr("writeable") = false;
  return view;
}
template py::array constant_view(std::span<const std::int32_t>, std::vector<std::int64_t>,
                                 std::shared_ptr<const void>);
template py::array constant_view(std::span<const std::int64_t>, std::vector<std::int64_t>,
                                 std::shared_ptr<const void>);
template py::array constant_view(std::span<const float>, std::vector<std::int64_t>,
                                 std::shared_ptr<const void>);

// Array -------------------------------------------------------------------------------------------

namespace {

/// An array of NumPy that DLPack sees with its true element type.
struct Array {
  py::array data;
  std::string dtype;  ///< "bf16", or the name that NumPy has
};

struct HeldArray {
  DlManagedTensor managed;
  PyObject* array = nullptr;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

py::capsule dlpack_of(const Array& array) {
  const Argument argument{"__dlpack__", "the array", 0};
  const View view = view_of_numpy(array.data, argument);
  const ElementType* const type =
      find_element(array.dtype == "bf16" ? "bfloat16" : view.element_name);
  if (type == nullptr) refuse(argument, "has elements that DLPack has no name for");
  auto held = std::make_unique<HeldArray>();
  held->shape = view.shape;
  for (const std::int64_t stride : view.strides) held->strides.push_back(stride / type->bytes);
  DlTensor& tensor = held->managed.tensor;
  tensor.data = view.data;
  tensor.num_dimensions = static_cast<std::int32_t>(held->shape.size());
  tensor.type.code = static_cast<std::uint8_t>(type->code);
  tensor.type.bits = static_cast<std::uint8_t>(type->bytes * 8);
  tensor.shape = held->shape.data();
  tensor.strides = held->strides.data();
  held->array = array.data.inc_ref().ptr();
  held->managed.context = held.get();
  held->managed.deleter = [](DlManagedTensor* managed) {
    auto* const kept = static_cast<HeldArray*>(managed->context);
    {
      if (Py_IsInitialized() == 0) return;  // Python has ended, and the array with it
      const py::gil_scoped_acquire gil;
      Py_DECREF(kept->array);
    }
    delete kept;
  };
  py::capsule capsule(&held->managed, "dltensor", &free_unused);
  static_cast<void>(held.release());
  return capsule;
}

/// Any array as NumPy sees it, bf16 as uint16, with the name of its element type.
py::tuple as_numpy(py::handle object, const std::string& call, int rank) {
  const View view = view_of(object, {call, "the array", rank});
  const bool bf16 = view.element == Element::bf16;
  if (view.is_numpy) {
    return py::make_tuple(view.keep, bf16 ? "bf16" : view.element_name, true);
  }
  if (view.element == Element::other) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: the array on rank {} has elements of {}; allowed: float32, "
                            "float16, float64, bfloat16, "
                            "int32, int64, uint16, uint8; fix: convert it",
                            call, rank, view.element_name));
  }
  const py::dtype type(bf16 ? "uint16" : view.element_name);
  return py::make_tuple(py::array(type, view.shape, view.strides, view.data, view.keep),
                        bf16 ? "bf16" : view.element_name, false);
}

}  // namespace

void bind_arrays(py::module_& module) {
  py::class_<Array>(module, "Array", R"(An array that Ferry made for a caller who uses DLPack.

Shapes: that of the result. dtype names the element type; "bf16" where NumPy has only its bits.
Give it to torch.from_dlpack() or numpy(); neither copies.)")
      .def(py::init([](const py::array& data, const std::string& dtype) {
             return Array{data, dtype};
           }),
           py::arg("data"), py::arg("dtype"))
      .def_property_readonly("shape", [](const Array& array) { return array.data.attr("shape"); })
      .def_readonly("dtype", &Array::dtype)
      .def(
          "numpy", [](const Array& array) { return array.data; },
          "The array as NumPy has it; bf16 as uint16.")
      .def("__array__", [](const Array& array,
                           const py::args& args) { return array.data.attr("__array__")(*args); })
      .def("__dlpack__", [](const Array& array, const py::kwargs&) { return dlpack_of(array); })
      .def("__dlpack_device__", [](const Array&) { return py::make_tuple(kDlCpu, 0); })
      .def("__repr__", [](const Array& array) {
        return fmt::format("ferry.Array(shape={}, dtype='{}')",
                           std::string(py::str(array.data.attr("shape"))), array.dtype);
      });
  module.def("as_numpy", &as_numpy, py::arg("array"), py::arg("call"), py::arg("rank"),
             "The array as NumPy sees it (bf16 as uint16), the name of its element type, and "
             "whether it was NumPy's.");
}

py::object make_array(const py::array& data, const std::string& dtype) {
  return py::cast(Array{data, dtype});
}

}  // namespace ferry::python
