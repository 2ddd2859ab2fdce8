#pragma once
// This process as a rank, for programs that call ferry.init().

#include <pybind11/pybind11.h>

namespace ferry::python {

void bind_session(pybind11::module_& module);

}  // namespace ferry::python
