#pragma once
// Arrays of Python as Ferry takes and gives them: NumPy, and whatever speaks DLPack. Nothing is
// copied here. What cannot be taken is a ferry::Error that names the call, the argument, the rank
// and the fix, so that the call can be refused on every rank with that text.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/matrix.hpp"
#include "ferry/routing.hpp"

namespace ferry::python {

namespace py = pybind11;

/// The element types that Ferry tells apart; `other` has a name only.
enum class Element : std::uint8_t { f32, f16, bf16, f64, i32, i64, u16, u8, other };

/// Which argument of which call, for texts.
struct Argument {
  std::string_view call;
  std::string_view name;
  int rank = 0;
};

/// Memory of an array. Strides are in bytes.
struct View {
  py::object keep;  ///< while it lives, so does the memory
  void* data = nullptr;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Element element = Element::other;
  std::string element_name;
  std::int64_t element_bytes = 0;
  bool writable = false;
  bool is_numpy = false;
};

/// Errors: invalid_argument: no array, memory of a device, a byte order that is not the machine's
View view_of(py::handle array, const Argument& argument);
/// Rows of an exchange with this dtype; uint16 of NumPy counts as bf16.
/// Errors: invalid_argument: no two dimensions, gaps inside rows, an element type Ferry has not
ConstMatrix matrix_of(const View& view, DType dtype, const Argument& argument);
/// The same for rows that Ferry writes. Errors: also memory that must not be written
Matrix output_of(const View& view, DType dtype, const Argument& argument);
/// FP32 values without gaps, of any shape.
std::span<const float> floats_of(const View& view, const Argument& argument);
std::span<float> float_output_of(const View& view, const Argument& argument);
/// Bytes of an array or of a bytes object, without gaps.
std::span<const std::byte> bytes_of(const View& view, const Argument& argument);
/// topk_idx [num_tokens, num_topk], int32 or int64, and FP32 weights of that shape (null = none).
Routing routing_of(const View& topk_idx, const View* topk_weights, const Argument& argument);

/// The NumPy type that holds rows of a dtype: uint16 for bf16.
py::dtype numpy_type(DType dtype);
/// A view that keeps `owner` alive. Nothing is copied.
py::array numpy_view(const Matrix& matrix, std::shared_ptr<const void> owner);
/// The same as a DLPack capsule.
py::capsule dlpack_view(const Matrix& matrix, std::shared_ptr<const void> owner);
/// Values of a plan, which must not be written.
template <typename Value>
py::array constant_view(std::span<const Value> values, std::vector<std::int64_t> shape,
                        std::shared_ptr<const void> owner);

/// Names the classes Array and the functions that Python code needs.
void bind_arrays(py::module_& module);
/// A new Array with rows of this dtype over an array that NumPy made.
py::object make_array(const py::array& data, const std::string& dtype);

}  // namespace ferry::python
