// The extension module ferry._ferry: errors, topologies, placements, and what the other files bind.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "arrays.hpp"
#include "exchange.hpp"
#include "ferry/error.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "group.hpp"
#include "options.hpp"
#include "pending.hpp"
#include "rows.hpp"
#include "session.hpp"

namespace ferry::python {

namespace {

/// The class of each code, by name; kept until the process ends, because errors come until then.
py::dict& error_types() {
  static auto* const types = new py::dict;
  return *types;
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const std::string code(to_string(error.code()));
    if (!error_types().contains(code)) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return;
    }
    PyErr_SetString(error_types()[code.c_str()].ptr(), error.what());
  }
}

py::tuple error_codes() {
  py::list codes;
  for (int code = 0; code < 256; ++code) {
    const std::string_view name = to_string(static_cast<ErrorCode>(code));
    if (name == "unknown") break;
    codes.append(std::string(name));
  }
  return py::tuple(codes);
}

/// Throws an error as the library does, so that a test sees what becomes of each code.
void raise_error(const std::string& code, const std::string& text) {
  for (int number = 0; number < 256; ++number) {
    const auto wanted = static_cast<ErrorCode>(number);
    if (to_string(wanted) == code) throw Error(wanted, text);
  }
  throw Error(ErrorCode::invalid_argument, code + " is no code");
}

void bind_shapes(py::module_& module) {
  py::class_<Topology>(module, "Topology", R"(Which ranks share memory (a node).

Ranks of a node are in ascending order; every rank is in one node.)")
      .def_static("single_node", &Topology::single_node, py::arg("num_ranks"),
                  "Every rank on one node.")
      .def_static("uniform", &Topology::uniform, py::arg("num_nodes"), py::arg("ranks_per_node"),
                  "Ranks 0..P-1 on node 0, the next P on node 1, and so on.")
      .def_static("from_sizes", &Topology::from_sizes, py::arg("ranks_per_node"),
                  "Node sizes in order, for example [3, 5]: ranks 0..2 and 3..7.")
      .def_static("from_map", &Topology::from_map, py::arg("node_of_rank"),
                  py::arg("socket_of_rank") = std::vector<int>{},
                  "The node of each rank, and its socket in it (empty = one socket a node).")
      .def_property_readonly("num_ranks", &Topology::num_ranks)
      .def_property_readonly("num_nodes", &Topology::num_nodes)
      .def(
          "node_of",
          [](const Topology& topology, int rank) {
            if (rank < 0 || rank >= topology.num_ranks()) throw py::index_error("no such rank");
            return topology.node_of(rank);
          },
          py::arg("rank"))
      .def(
          "local_index",
          [](const Topology& topology, int rank) {
            if (rank < 0 || rank >= topology.num_ranks()) throw py::index_error("no such rank");
            return topology.local_index(rank);
          },
          py::arg("rank"), "Place of a rank among the ranks of its node.")
      .def(
          "ranks_of",
          [](const Topology& topology, int node) {
            if (node < 0 || node >= topology.num_nodes()) throw py::index_error("no such node");
            return topology.ranks_of(node);
          },
          py::arg("node"))
      .def("describe", &Topology::describe, "For example '2 x 4' or '3 + 5'.")
      .def(
          "__eq__", [](const Topology& one, const Topology& other) { return one == other; },
          py::is_operator())
      .def("__hash__", [](const Topology& topology) { return topology.hash(); })
      .def("__repr__",
           [](const Topology& topology) { return "ferry.Topology(" + topology.describe() + ")"; });

  py::class_<Placement>(module, "Placement", "Which rank holds which expert. Any map is allowed.")
      .def_static("contiguous", &Placement::contiguous, py::arg("num_experts"),
                  py::arg("num_ranks"),
                  "Experts in blocks, so that the ranks' shares differ by at most one.")
      .def_static("from_map", &Placement::from_map, py::arg("rank_of_expert"),
                  "rank_of_expert[e] = the rank that holds expert e.")
      .def_property_readonly("num_experts", &Placement::num_experts)
      .def(
          "rank_of",
          [](const Placement& placement, int expert) {
            if (expert < 0 || expert >= placement.num_experts()) {
              throw py::index_error("no such expert");
            }
            return placement.rank_of(expert);
          },
          py::arg("expert"))
      .def(
          "__eq__", [](const Placement& one, const Placement& other) { return one == other; },
          py::is_operator())
      .def("__hash__", [](const Placement& placement) { return placement.hash(); })
      .def("__repr__", [](const Placement& placement) {
        return "ferry.Placement(num_experts=" + std::to_string(placement.num_experts()) + ")";
      });
}

}  // namespace

PYBIND11_MODULE(_ferry, module) {
  module.doc() = "The part of Ferry that is C++; import ferry, not this.";
  module.attr("__version__") = FERRY_VERSION;
  py::register_exception_translator(&translate);
  module.attr("ERROR_CODES") = error_codes();
  module.def(
      "set_error_types", [](const py::dict& types) { error_types() = types; }, py::arg("types"),
      "Names the class that each error code becomes.");
  module.def("raise_error", &raise_error, py::arg("code"), py::arg("text"),
             "Raises an error as the library does.");
  module.def(
      "raise_in_thread",
      [](unsigned long thread, const py::object& type) {
        return PyThreadState_SetAsyncExc(thread, type.ptr());
      },
      py::arg("thread_id"), py::arg("type"),
      "Makes a thread raise this exception at its next step of Python.");
  module.def(
      "choose_wires",
      [](const py::object& dtype, double max_relative_error, double link_bytes_per_s_per_rank,
         bool quantise_combine, bool round_gradients) {
        return chosen_wires(dtype, {.max_relative_error = max_relative_error,
                                    .link_bytes_per_s_per_rank = link_bytes_per_s_per_rank,
                                    .quantise_combine = quantise_combine,
                                    .round_gradients = round_gradients});
      },
      py::arg("dtype"), py::arg("max_relative_error"), py::arg("link_bytes_per_s_per_rank"),
      py::arg("quantise_combine"), py::arg("round_gradients"));
  bind_shapes(module);
  bind_arrays(module);
  bind_rows(module);
  bind_pending(module);
  bind_group(module);
  bind_exchange(module);
  bind_session(module);
}

}  // namespace ferry::python
