#pragma once
// Rows in a window and plans, as Python holds them. Both may be kept longer than their group: a
// view keeps the window's slot, and the slot its memory.

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "ferry/exchange.hpp"

namespace ferry::python {

namespace py = pybind11;

/// Shared by the object of Python and every view of its memory.
struct PyRows {
  std::shared_ptr<const WindowRows> rows;
};
struct PyExpertRows : PyRows {
  std::shared_ptr<const ExpertRows> expert_rows;
  std::int64_t extra_bytes = 0;
};
struct PyOutputRows : PyRows {};
struct PyGradRows : PyRows {};

PyExpertRows expert_rows_of(ExpertRows&& rows, std::int64_t extra_bytes);
PyOutputRows output_rows_of(OutputRows&& rows);
PyGradRows grad_rows_of(GradRows&& rows);

void bind_rows(py::module_& module);

}  // namespace ferry::python
