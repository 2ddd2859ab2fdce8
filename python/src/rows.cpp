// Rows and plans: see rows.hpp.

#include "rows.hpp"

#include <pybind11/numpy.h>

#include <vector>

#include <fmt/format.h>

#include "arrays.hpp"
#include "dlpack.hpp"

namespace ferry::python {

namespace {

std::shared_ptr<const Plan> keep(const Plan& plan) { return std::make_shared<const Plan>(plan); }

template <typename Value>
py::array view_of_values(const Plan& plan, std::span<const Value> values) {
  return constant_view(values, {static_cast<std::int64_t>(values.size())}, keep(plan));
}

/// [num_rows, num_topk] of token_major; [0, 0] elsewhere.
template <typename Value>
py::array view_of_slots(const Plan& plan, std::span<const Value> values) {
  const std::int64_t rows = values.empty() ? 0 : plan.num_rows();
  const std::int64_t columns = rows == 0 ? 0 : static_cast<std::int64_t>(values.size()) / rows;
  return constant_view(values, {rows, columns}, keep(plan));
}

py::array extra_of(const PyExpertRows& rows) {
  const Matrix matrix = rows.expert_rows->matrix();
  std::byte* const first =
      matrix.rows == 0 ? nullptr : const_cast<std::byte*>(rows.expert_rows->extra(0).data());
  auto* const kept = new std::shared_ptr<const WindowRows>(rows.rows);
  const py::capsule owner(
      kept, [](void* held) { delete static_cast<std::shared_ptr<const WindowRows>*>(held); });
  return py::array(py::dtype("uint8"), {matrix.rows, rows.extra_bytes},
                   {matrix.stride_bytes(), std::int64_t{1}}, first, owner);
}

template <typename Bound>
void bind_summary(Bound& summary) {
  summary.def_readonly("rows_received", &PlanSummary::rows_received)
      .def_readonly("window_bytes", &PlanSummary::window_bytes)
      .def_readonly("metadata_bytes", &PlanSummary::metadata_bytes)
      .def_readonly("index_bytes", &PlanSummary::index_bytes)
      .def_readonly("inter_node_bytes_dispatch", &PlanSummary::inter_node_bytes_dispatch)
      .def_readonly("inter_node_bytes_combine", &PlanSummary::inter_node_bytes_combine)
      .def_readonly("inter_node_bytes_combine_backward",
                    &PlanSummary::inter_node_bytes_combine_backward)
      .def_readonly("inter_node_bytes_dispatch_backward",
                    &PlanSummary::inter_node_bytes_dispatch_backward)
      .def_readonly("inter_node_bytes_grad_weights", &PlanSummary::inter_node_bytes_grad_weights)
      .def_readonly("inter_node_rows_dispatch", &PlanSummary::inter_node_rows_dispatch)
      .def_readonly("inter_node_rows_combine", &PlanSummary::inter_node_rows_combine)
      .def_readonly("inter_socket_bytes_dispatch", &PlanSummary::inter_socket_bytes_dispatch);
}

struct PyRowSources {
  Plan plan;
};

void bind_plan(py::module_& module) {
  py::class_<PlanSummary> summary(module, "PlanSummary",
                                  "Rows and bytes of a plan, known before anything is sent. Bytes "
                                  "count what this rank sends.\n\n"
                                  "inter_node_bytes_* are exact, except where the size of a row "
                                  "depends on its values: with max_relative_error they are the "
                                  "least that quantised rows may take, of sparse formats the most. "
                                  "Exchange.wire_statistics counts what was sent.");
  bind_summary(summary);
  py::class_<PyRowSources>(module, "RowSources",
                           R"(Where the rows of a window come from, one value per row.

Alignment rows have rank, token and slot -1 and weight 0.
Shapes: rank int32, token int64, slot int32, weight float32, each [num_rows]; slot and weight are
        empty with token_major, and all are where the exchange does not keep row sources)")
      .def_property_readonly("rank",
                             [](const PyRowSources& of) {
                               return view_of_values(of.plan, std::span<const std::int32_t>(
                                                                  of.plan.row_sources().rank));
                             })
      .def_property_readonly("token",
                             [](const PyRowSources& of) {
                               return view_of_values(of.plan, std::span<const std::int64_t>(
                                                                  of.plan.row_sources().token));
                             })
      .def_property_readonly("slot",
                             [](const PyRowSources& of) {
                               return view_of_values(of.plan, std::span<const std::int32_t>(
                                                                  of.plan.row_sources().slot));
                             })
      .def_property_readonly("weight", [](const PyRowSources& of) {
        return view_of_values(of.plan, std::span<const float>(of.plan.row_sources().weight));
      });
  py::class_<Plan>(module, "Plan", R"(Who sends which rows where, for one routing.

Made once by Exchange.plan, replayed any number of times. Its arrays are NumPy views that cannot be
written; they may outlive the plan and the group.)")
      .def_property_readonly("num_rows", &Plan::num_rows,
                             "Rows of this rank's window, alignment rows included.")
      .def_property_readonly("num_tokens", &Plan::num_tokens,
                             "Tokens of this rank's routing: rows of x and out.")
      .def_property_readonly(
          "expert_counts",
          [](const Plan& plan) { return view_of_values(plan, plan.expert_counts()); },
          "int64 [num_local_experts]: rows that each local expert works on, by expert id.")
      .def_property_readonly(
          "expert_offsets",
          [](const Plan& plan) { return view_of_values(plan, plan.expert_offsets()); },
          "int64 [num_local_experts + 1]: first row of each local expert, num_rows at the end; "
          "empty with token_major.")
      .def_property_readonly(
          "local_experts",
          [](const Plan& plan) { return view_of_values(plan, plan.local_experts()); },
          "int32 [num_local_experts]: global ids of the local experts, ascending.")
      .def_property_readonly("summary", &Plan::summary, py::return_value_policy::copy)
      .def_property_readonly("row_sources", [](const Plan& plan) { return PyRowSources{plan}; })
      .def_property_readonly(
          "topk_idx", [](const Plan& plan) { return view_of_slots(plan, plan.topk_idx()); },
          "int32 [num_rows, num_topk] with token_major: the local expert of a slot, or -1.")
      .def_property_readonly(
          "topk_weights", [](const Plan& plan) { return view_of_slots(plan, plan.topk_weights()); },
          "float32 [num_rows, num_topk] with token_major: the weight for that expert.")
      .def("__repr__", [](const Plan& plan) {
        return fmt::format("ferry.Plan(num_rows={}, num_local_experts={})", plan.num_rows(),
                           plan.local_experts().size());
      });
}

}  // namespace

PyExpertRows expert_rows_of(ExpertRows&& rows, std::int64_t extra_bytes) {
  PyExpertRows made;
  made.expert_rows = std::make_shared<const ExpertRows>(std::move(rows));
  made.rows = made.expert_rows;
  made.extra_bytes = extra_bytes;
  return made;
}

PyOutputRows output_rows_of(OutputRows&& rows) {
  PyOutputRows made;
  made.rows = std::make_shared<const OutputRows>(std::move(rows));
  return made;
}

PyGradRows grad_rows_of(GradRows&& rows) {
  PyGradRows made;
  made.rows = std::make_shared<const GradRows>(std::move(rows));
  return made;
}

void bind_rows(py::module_& module) {
  bind_plan(module);
  py::class_<PyRows>(module, "WindowRows",
                     R"(Rows in this rank's window, in the order of the layout.

Shapes: [num_rows, hidden] in the dtype of the exchange; rows start at multiples of 64 bytes.
Views of it cost no copy and keep the memory, as long as any of them lives: after this object, and
after the group. The slot of the window is free again when all are gone.)")
      .def_property_readonly("num_rows", [](const PyRows& of) { return of.rows->num_rows(); })
      .def_property_readonly("shape",
                             [](const PyRows& of) {
                               const Matrix matrix = of.rows->matrix();
                               return py::make_tuple(matrix.rows, matrix.columns);
                             })
      .def_property_readonly(
          "dtype", [](const PyRows& of) { return std::string(to_string(of.rows->matrix().dtype)); })
      .def_property_readonly("plan", [](const PyRows& of) { return of.rows->plan(); })
      .def(
          "numpy", [](const PyRows& of) { return numpy_view(of.rows->matrix(), of.rows); },
          "The rows as a NumPy array with a stride; bf16 as uint16.")
      .def("__array__",
           [](const PyRows& of, const py::args& args) {
             return numpy_view(of.rows->matrix(), of.rows).attr("__array__")(*args);
           })
      .def("__dlpack__", [](const PyRows& of,
                            const py::kwargs&) { return dlpack_view(of.rows->matrix(), of.rows); })
      .def("__dlpack_device__", [](const PyRows&) { return py::make_tuple(kDlCpu, 0); })
      .def("__repr__", [](const py::object& self) {
        return fmt::format("ferry.{}(shape={}, dtype='{}')",
                           std::string(py::str(py::type::of(self).attr("__name__"))),
                           std::string(py::str(self.attr("shape"))),
                           std::string(py::str(self.attr("dtype"))));
      });
  py::class_<PyExpertRows, PyRows>(module, "ExpertRows",
                                   "What dispatch brought: the tokens for this rank's experts.")
      .def_property_readonly("extra", &extra_of,
                             "uint8 [num_rows, extra_bytes]: what came along with each row.");
  py::class_<PyOutputRows, PyRows>(module, "OutputRows",
                                   "Where the experts' outputs are best written: combine then "
                                   "reads them in place.");
  py::class_<PyGradRows, PyRows>(module, "GradRows",
                                 "Gradients of the experts' outputs, in the same places.");
}

}  // namespace ferry::python
