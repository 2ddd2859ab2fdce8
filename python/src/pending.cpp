// Pending, as Python holds it.

#include "pending.hpp"

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry::python {

bool PyPending::done() const {
  if (result_) return true;
  const AnyPending* const pending = started();
  return pending == nullptr || pending->done();
}

bool PyPending::progress() {
  if (done()) return true;
  const Group::Use use(*group_);
  return without_gil([this] { return started()->progress(); });
}

py::object PyPending::wait() {
  if (result_) return result_;
  const Group::Use use(*group_);
  if (started() == nullptr) {
    throw Error(ErrorCode::cancelled, "wait: the call was given up; fix: start it again");
  }
  without_gil([this] { started()->finish(); });
  result_ = started()->take();
  resource_->let_go();
  return result_;
}

void PyPending::cancel(const std::string& reason) {
  if (done()) return;
  const Group::Use use(*group_);
  without_gil([&] { started()->cancel(reason); });
}

void bind_pending(py::module_& module) {
  py::class_<PyPending> pending(module, "Pending",
                                R"(An operation that was started and may not be done.

It keeps the arrays that it reads and writes alive. Dropping it before it is done cancels it on all
ranks. With no wait() running, call progress() about every 100 us, or give the group a progress
thread; ranks that need rows of this one wait meanwhile.)");
  pending
      .def("progress", &PyPending::progress, R"(One round of work for all operations of the group.

Returns: True once this one has ended.
Errors:  WrongThreadError, PeerFailedError)")
      .def("done", &PyPending::done,
           "True once it has ended, well or not; wait() then returns at once.")
      .def("wait", &PyPending::wait, R"(Works on all operations of the group until this one ends.

Returns: its result, the same one each time.
Errors:  whatever the operation failed with, the same text on every rank)")
      .def("cancel", &PyPending::cancel, py::arg("reason") = "the caller gave up",
           R"(Gives up: the operation fails on every rank with this reason.)")
      .def("__repr__", [](const PyPending& one) {
        return one.done() ? "ferry.Pending(done)" : "ferry.Pending(running)";
      });
  // Type hints name the result: Pending[Plan].
  pending.attr("__class_getitem__") =
      py::module_::import("builtins")
          .attr("classmethod")(
              py::cpp_function([](const py::object& self, const py::object&) { return self; }));
}

}  // namespace ferry::python
