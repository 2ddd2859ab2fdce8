// What ferry.init() needs of the launcher; see ferry/launch.hpp.

#include "session.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ferry/launch.hpp"
#include "group.hpp"

namespace ferry::python {

namespace {

std::shared_ptr<Group> group_on(std::unique_ptr<Transport> transport,
                                const launch::Options& options, bool checks_signals) {
  return std::make_shared<Group>(std::move(transport),
                                 GroupOptions{.limits = {.deadline_s = options.deadline_s},
                                              .progress_thread = options.progress_thread,
                                              .checks_signals = checks_signals});
}

launch::Options options_of(std::optional<Topology> topology, const std::string& mpi,
                           double deadline_s, bool progress_thread) {
  return {.topology = std::move(topology),
          .mpi = mpi,
          .deadline_s = deadline_s,
          .progress_thread = progress_thread};
}

}  // namespace

void bind_session(py::module_& module) {
  py::class_<launch::Session>(module, "Session", "This process as one rank, until end().")
      .def(py::init([](const std::string& mpi, double deadline_s, bool progress_thread) {
             return without_gil([&] {
               return std::make_unique<launch::Session>(
                   options_of(std::nullopt, mpi, deadline_s, progress_thread));
             });
           }),
           py::arg("mpi"), py::arg("deadline_s"), py::arg("progress_thread"))
      .def(
          "attach",
          [](launch::Session& session, const std::optional<Topology>& topology, double deadline_s,
             bool progress_thread, bool checks_signals) {
            return without_gil([&] {
              return group_on(session.attach(topology),
                              options_of(topology, "auto", deadline_s, progress_thread),
                              checks_signals);
            });
          },
          py::arg("topology"), py::arg("deadline_s"), py::arg("progress_thread"),
          py::arg("checks_signals"))
      .def("end", &launch::Session::end, py::call_guard<py::gil_scoped_release>());
  module.def(
      "attach",
      [](std::uintptr_t comm, const std::string& mpi, const std::optional<Topology>& topology,
         double deadline_s, bool progress_thread, bool checks_signals) {
        return without_gil([&] {
          const launch::Options options = options_of(topology, mpi, deadline_s, progress_thread);
          return group_on(launch::attach(reinterpret_cast<const void*>(comm), options), options,
                          checks_signals);
        });
      },
      py::arg("comm"), py::arg("mpi"), py::arg("topology"), py::arg("deadline_s"),
      py::arg("progress_thread"), py::arg("checks_signals"),
      "A group over the communicator at this address.");
}

}  // namespace ferry::python
