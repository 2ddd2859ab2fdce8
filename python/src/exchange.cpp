// Exchange: takes arrays of Python, starts operations, hands out pendings. An argument that Ferry's
// types cannot hold refuses the call on every rank (Exchange::refuse_next), so that no rank waits
// for one whose arrays were wrong.

#include "exchange.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "arrays.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "group.hpp"
#include "options.hpp"
#include "pending.hpp"
#include "rows.hpp"

namespace ferry::python {

namespace {

class ExchangeResource final : public Resource {
 public:
  explicit ExchangeResource(ferry::Exchange made) : exchange(std::move(made)) {}
  void let_go() override {
    without_gil([this] { exchange.reset(); });
  }
  bool goes_first() const override { return false; }

  std::optional<ferry::Exchange> exchange;
};

/// The arrays of one call: what they are for Ferry, and what keeps them alive. With an error the
/// call is to be refused.
class Arguments {
 public:
  Arguments(std::string_view call, const Group& group, DType dtype)
      : call_(call), rank_(group.rank()), dtype_(dtype) {}

  /// Takes one argument; the first refusal counts, and later arguments are then left alone.
  template <typename Take>
  void take(const py::object& array, std::string_view name, const Take& take_view) {
    if (error) return;
    try {
      const Argument argument{call_, name, rank_};
      if (const auto* const rows = window_of(array)) {
        keep.push_back(array);
        take_view(view_of_rows(array, *rows), argument);
        return;
      }
      View view = view_of(array, argument);
      keep.push_back(view.keep);
      take_view(view, argument);
    } catch (const Error& refusal) {
      error = refusal;
    } catch (const std::exception& raised) {
      const auto* const python = dynamic_cast<const py::error_already_set*>(&raised);
      if (python != nullptr && !python->matches(PyExc_Exception)) throw;  // Ctrl-C
      refuse(name, raised.what());
    }
  }
  ConstMatrix rows(const py::object& array, std::string_view name) {
    ConstMatrix matrix;
    take(array, name, [&](const View& view, const Argument& argument) {
      matrix = matrix_of(view, dtype_, argument);
      used_numpy = view.is_numpy;
    });
    return matrix;
  }
  Matrix output(const py::object& array, std::string_view name) {
    Matrix matrix;
    take(array, name,
         [&](const View& view, const Argument& of) { matrix = output_of(view, dtype_, of); });
    return matrix;
  }
  std::span<const std::byte> bytes(const py::object& array, std::string_view name) {
    std::span<const std::byte> found;
    if (array.is_none()) return found;
    take(array, name, [&](const View& view, const Argument& of) { found = bytes_of(view, of); });
    return found;
  }
  std::span<float> float_output(const py::object& array, std::string_view name) {
    std::span<float> found;
    if (array.is_none()) return found;
    take(array, name,
         [&](const View& view, const Argument& of) { found = float_output_of(view, of); });
    return found;
  }
  std::span<const float> floats(const py::object& array, std::string_view name) {
    std::span<const float> found;
    if (array.is_none()) return found;
    take(array, name,
         [&](const View& view, const Argument& argument) { found = floats_of(view, argument); });
    return found;
  }
  Routing routing(const py::object& topk_idx, const py::object& topk_weights) {
    // What a refused call is started with: refused by Ferry, too.
    Routing routing{.num_tokens = -1};
    std::optional<View> weights;
    if (!topk_weights.is_none()) {
      take(topk_weights, "topk_weights",
           [&](const View& view, const Argument&) { weights = view; });
    }
    take(topk_idx, "topk_idx", [&](const View& view, const Argument& of) {
      routing = routing_of(view, weights ? &*weights : nullptr, of);
    });
    return error ? Routing{.num_tokens = -1} : routing;
  }

  std::optional<Error> error;
  std::vector<py::object> keep;
  bool used_numpy = false;

 private:
  void refuse(std::string_view name, std::string_view why) {
    error = Error(ErrorCode::invalid_argument,
                  fmt::format("{}: {} on rank {} cannot be read: {}; fix: pass an array of NumPy, "
                              "or a tensor with __dlpack__",
                              call_, name, rank_, why.substr(0, why.find('\n'))));
  }
  static const PyRows* window_of(const py::object& array) {
    return py::isinstance<PyRows>(array) ? array.cast<const PyRows*>() : nullptr;
  }
  static View view_of_rows(const py::object& array, const PyRows& rows) {
    const Matrix matrix = rows.rows->matrix();
    const auto bytes = static_cast<std::int64_t>(element_bytes(matrix.dtype));
    View view;
    view.keep = array;
    view.data = matrix.data;
    view.shape = {matrix.rows, matrix.columns};
    view.strides = {matrix.stride_bytes(), bytes};
    view.element_name = to_string(matrix.dtype);
    view.element_bytes = bytes;
    view.writable = true;
    switch (matrix.dtype) {
      case DType::f32: view.element = Element::f32; break;
      case DType::bf16: view.element = Element::bf16; break;
      case DType::f16: view.element = Element::f16; break;
    }
    return view;
  }

  std::string_view call_;
  int rank_;
  DType dtype_;
};

/// What Python's Exchange wraps.
class PyExchange {
 public:
  PyExchange(std::shared_ptr<Group> group, const Placement& placement, RowShape shape,
             const ExchangeOptions& options)
      : group_(std::move(group)), shape_(shape) {
    const Group::Use use(*group_);
    resource_ = without_gil([&] {
      return std::make_unique<ExchangeResource>(
          ferry::Exchange(use.transport(), placement, shape, options));
    });
    options_ = resource_->exchange->options();
    group_->add(resource_.get());
  }
  ~PyExchange() {
    if (resource_) group_->bury(std::move(resource_));
  }
  PyExchange(const PyExchange&) = delete;
  PyExchange& operator=(const PyExchange&) = delete;

  const ExchangeOptions& options() const { return options_; }
  const RowShape& shape() const { return shape_; }

  std::unique_ptr<PyPending> start_plan(const py::object& topk_idx, const py::object& topk_weights,
                                        PyPending* gathering) {
    Arguments given("plan", *group_, shape_.dtype);
    const Routing routing = given.routing(topk_idx, topk_weights);
    auto* const early = gathering == nullptr ? nullptr : gathering_of(*gathering);
    return start<Plan>(
        given,
        [&](ferry::Exchange& exchange) {
          return early == nullptr ? exchange.start_plan(routing)
                                  : exchange.start_plan(routing, *early);
        },
        [](Plan&& plan) { return py::cast(std::move(plan)); });
  }

  std::unique_ptr<PyPending> start_dispatch(const Plan& plan, const py::object& x,
                                            const py::object& extra) {
    Arguments given("dispatch", *group_, shape_.dtype);
    const ConstMatrix rows = given.rows(x, "x");
    const auto bytes = given.bytes(extra, "extra");
    return start<ExpertRows>(
        given,
        [&](ferry::Exchange& exchange) { return exchange.start_dispatch(plan, rows, bytes); },
        to_expert_rows());
  }

  std::unique_ptr<PyPending> start_gather(const py::object& x, const py::object& extra) {
    Arguments given("start_gather", *group_, shape_.dtype);
    const ConstMatrix rows = given.rows(x, "x");
    const auto bytes = given.bytes(extra, "extra");
    return start<ExpertRows>(
        given, [&](ferry::Exchange& exchange) { return exchange.start_gather(rows, bytes); },
        to_expert_rows());
  }

  std::unique_ptr<PyPending> start_plan_and_dispatch(const py::object& topk_idx,
                                                     const py::object& topk_weights,
                                                     const py::object& x, const py::object& extra) {
    Arguments given("plan_and_dispatch", *group_, shape_.dtype);
    const ConstMatrix rows = given.rows(x, "x");
    const auto bytes = given.bytes(extra, "extra");
    const Routing routing = given.routing(topk_idx, topk_weights);
    return start<Dispatched>(
        given,
        [&](ferry::Exchange& exchange) {
          return exchange.start_plan_and_dispatch(routing, rows, bytes);
        },
        [convert = to_expert_rows()](Dispatched&& dispatched) -> py::object {
          py::object plan = py::cast(dispatched.plan);
          return py::make_tuple(plan, convert(std::move(dispatched.rows)));
        });
  }

  PyOutputRows output(const Plan& plan) {
    const Group::Use use(*group_);
    return output_rows_of(without_gil([&] { return exchange().output(plan); }));
  }

  std::unique_ptr<PyPending> start_combine(const Plan& plan, const py::object& y,
                                           const py::object& out) {
    Arguments given("combine", *group_, shape_.dtype);
    const ConstMatrix rows = given.rows(y, "y");
    const auto [sums, result] = home_rows(given, plan, out, "out");
    return start<void>(
        given,
        [&, to = sums](ferry::Exchange& exchange) {
          return exchange.start_combine(plan, rows, to);
        },
        [kept = result](std::monostate&&) { return kept; });
  }

  std::unique_ptr<PyPending> start_combine_backward(const Plan& plan, const py::object& grad_out,
                                                    const py::object& y,
                                                    const py::object& grad_weights) {
    Arguments given("combine_backward", *group_, shape_.dtype);
    CombineBackwardInput input;
    input.grad_out = given.rows(grad_out, "grad_out");
    if (!y.is_none()) input.y = given.rows(y, "y");
    // Whether there are any tells what call it is, also one that is refused.
    std::optional<std::span<float>> weights;
    if (!grad_weights.is_none()) weights = given.float_output(grad_weights, "grad_weights");
    return start<GradRows>(
        given,
        [&](ferry::Exchange& exchange) {
          return exchange.start_combine_backward(plan, input, weights);
        },
        [](GradRows&& rows) { return py::cast(grad_rows_of(std::move(rows))); });
  }

  std::unique_ptr<PyPending> start_dispatch_backward(const Plan& plan, const py::object& grad_rows,
                                                     const py::object& grad_row_weights,
                                                     const py::object& grad_x,
                                                     const py::object& grad_weights) {
    Arguments given("dispatch_backward", *group_, shape_.dtype);
    DispatchBackwardInput input;
    DispatchBackwardOutput output;
    input.grad_rows = given.rows(grad_rows, "grad_rows");
    if (!grad_row_weights.is_none()) {
      input.grad_row_weights = given.floats(grad_row_weights, "grad_row_weights");
    }
    if (!grad_weights.is_none()) {
      output.grad_weights = given.float_output(grad_weights, "grad_weights");
    }
    const auto [sums, result] = home_rows(given, plan, grad_x, "grad_x");
    output.grad_x = sums;
    return start<void>(
        given,
        [&](ferry::Exchange& exchange) {
          return exchange.start_dispatch_backward(plan, input, output);
        },
        [kept = result](std::monostate&&) { return kept; });
  }

  /// A figure that the exchange keeps.
  template <auto Figure>
  auto figure() {
    const Group::Use use(*group_);
    return without_gil([&] { return (exchange().*Figure)(); });
  }

  py::dict wire_statistics() {
    const Group::Use use(*group_);
    const WireStatistics sent = without_gil([&] { return exchange().wire_statistics(); });
    const auto shown = [](const WireUse& of_call) {
      py::dict made;
      made["rows"] = of_call.rows;
      made["escalated_rows"] = of_call.escalated_rows;
      made["payload_bytes"] = of_call.payload_bytes;
      return made;
    };
    py::dict made;
    made["dispatch"] = shown(sent.dispatch);
    made["combine"] = shown(sent.combine);
    made["combine_backward"] = shown(sent.combine_backward);
    made["dispatch_backward"] = shown(sent.dispatch_backward);
    return made;
  }

 private:
  ferry::Exchange& exchange() { return *resource_->exchange; }

  /// Where sums of this rank's tokens go, and what the caller gets: `out`, or a new array that is
  /// NumPy's where the rows that are summed are.
  std::pair<Matrix, py::object> home_rows(Arguments& given, const Plan& plan, const py::object& out,
                                          std::string_view name) const {
    if (!out.is_none()) {
      const Matrix rows = given.output(out, name);
      return {given.error ? Matrix{} : rows, out};
    }
    const py::array made(numpy_type(shape_.dtype), {plan.num_tokens(), shape_.hidden});
    const Matrix rows = given.output(made, name);
    return {given.error ? Matrix{} : rows,
            given.used_numpy ? py::object(made)
                             : make_array(made, std::string(to_string(shape_.dtype)))};
  }

  StartedPending<ExpertRows>::Convert to_expert_rows() const {
    return [extra_bytes = options_.extra_bytes](ExpertRows&& rows) {
      return py::cast(expert_rows_of(std::move(rows), extra_bytes));
    };
  }

  // Refused on this rank alone, as Ferry refuses a gathering that is not one.
  Pending<ExpertRows>* gathering_of(PyPending& gathering) {
    auto* const early = dynamic_cast<StartedPending<ExpertRows>*>(gathering.started());
    if (early != nullptr && gathering.group() == group_) return &early->pending();
    throw Error(ErrorCode::invalid_argument,
                fmt::format("plan: what was given as `gathering` on rank {} is no running "
                            "start_gather of this group; fix: give its Pending",
                            group_->rank()));
  }

  template <typename Result, typename Call>
  std::unique_ptr<PyPending> start(Arguments& given, const Call& call,
                                   typename StartedPending<Result>::Convert convert) {
    const Group::Use use(*group_);
    Pending<Result> started = without_gil([&] {
      if (given.error) exchange().refuse_next(*given.error);
      return call(exchange());
    });
    return make_pending(group_, std::move(started), std::move(convert), std::move(given.keep));
  }

  std::shared_ptr<Group> group_;
  RowShape shape_;
  ExchangeOptions options_;
  std::unique_ptr<ExchangeResource> resource_;
};

}  // namespace

void bind_exchange(py::module_& module) {
  py::class_<PyExchange>(module, "ExchangeCore", "What ferry.Exchange wraps.")
      .def(py::init([](std::shared_ptr<Group> group, const Placement& placement,
                       std::int64_t hidden, const py::object& dtype, const py::dict& options) {
             const RowShape shape{.hidden = hidden, .dtype = dtype_named("dtype", dtype)};
             const ExchangeOptions wanted = options_of(options, shape.dtype, group->topology());
             return std::make_unique<PyExchange>(std::move(group), placement, shape, wanted);
           }),
           py::arg("group"), py::arg("placement"), py::arg("hidden"), py::arg("dtype"),
           py::arg("options"))
      .def_property_readonly("options",
                             [](const PyExchange& exchange) { return dict_of(exchange.options()); })
      .def_property_readonly("hidden",
                             [](const PyExchange& exchange) { return exchange.shape().hidden; })
      .def_property_readonly(
          "dtype",
          [](const PyExchange& exchange) { return std::string(to_string(exchange.shape().dtype)); })
      .def("start_plan", &PyExchange::start_plan, py::arg("topk_idx"), py::arg("topk_weights"),
           py::arg("gathering"))
      .def("start_dispatch", &PyExchange::start_dispatch, py::arg("plan"), py::arg("x"),
           py::arg("extra"))
      .def("start_gather", &PyExchange::start_gather, py::arg("x"), py::arg("extra"))
      .def("start_plan_and_dispatch", &PyExchange::start_plan_and_dispatch, py::arg("topk_idx"),
           py::arg("topk_weights"), py::arg("x"), py::arg("extra"))
      .def("output", &PyExchange::output, py::arg("plan"))
      .def("start_combine", &PyExchange::start_combine, py::arg("plan"), py::arg("y"),
           py::arg("out"))
      .def("start_combine_backward", &PyExchange::start_combine_backward, py::arg("plan"),
           py::arg("grad_out"), py::arg("y"), py::arg("grad_weights"))
      .def("start_dispatch_backward", &PyExchange::start_dispatch_backward, py::arg("plan"),
           py::arg("grad_rows"), py::arg("grad_row_weights"), py::arg("grad_x"),
           py::arg("grad_weights"))
      .def("wire_statistics", &PyExchange::wire_statistics)
      .def("metadata_rounds", &PyExchange::figure<&ferry::Exchange::metadata_rounds>)
      .def("host_stalls", &PyExchange::figure<&ferry::Exchange::host_stalls>)
      .def("stall_us", &PyExchange::figure<&ferry::Exchange::stall_us>);
}

}  // namespace ferry::python
