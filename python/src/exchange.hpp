#pragma once
// The exchange as Python holds it.

#include <pybind11/pybind11.h>

namespace ferry::python {

void bind_exchange(pybind11::module_& module);

}  // namespace ferry::python
