// What ferry.init() needs of the launcher.

#include "session.hpp"

namespace ferry::python {

void bind_session(pybind11::module_& /*module*/) {}

}  // namespace ferry::python
