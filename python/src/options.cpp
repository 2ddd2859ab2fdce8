// Options of an exchange: see options.hpp.

#include "options.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace py = pybind11;

namespace ferry::python {
namespace {

[[noreturn]] void refuse_option(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "exchange: " + what);
}

template <typename Value>
Value named(const std::optional<Value>& value, std::string_view option, const py::handle& given,
            std::string_view allowed) {
  if (value) return *value;
  refuse_option(fmt::format("{} = {}; allowed: {}; fix: correct it", option,
                            std::string(py::repr(given)), allowed));
}

template <typename Value>
Value number(std::string_view option, const py::handle& given) {
  try {
    return given.cast<Value>();
  } catch (const py::cast_error&) {
    refuse_option(fmt::format("{} = {}; allowed: a number or a flag that fits it; fix: correct it",
                              option, std::string(py::repr(given))));
  }
}

/// Nothing for None.
std::optional<WireFormat> wire_named(std::string_view option, const py::handle& given) {
  if (given.is_none()) return std::nullopt;
  return named(py::isinstance<py::str>(given) ? wire_format_from_string(given.cast<std::string>())
                                              : std::nullopt,
               option, given,
               "None, 'f32', 'bf16', 'f16', 'fp8_e4m3fn', 'int8', 'sparse_f32', 'sparse_bf16', "
               "'sparse_f16'");
}

/// None is no limit, as the option that is left out.
double limit_of(const py::handle& given) {
  return given.is_none() ? 0 : number<double>("max_relative_error", given);
}

using SetOption = void (*)(ExchangeOptions&, const py::handle&);
const std::map<std::string, SetOption, std::less<>>& option_setters() {
  static const std::map<std::string, SetOption, std::less<>> setters{
      {"strategy",
       [](ExchangeOptions& options, const py::handle& given) {
         options.strategy = named(strategy_from_string(std::string(py::str(given))), "strategy",
                                  given, "'flat', 'rank_dedup', 'node_gather', 'node_dedup'");
       }},
      {"layout",
       [](ExchangeOptions& options, const py::handle& given) {
         options.layout = named(layout_from_string(std::string(py::str(given))), "layout", given,
                                "'expert_major', 'token_major'");
       }},
      {"weights",
       [](ExchangeOptions& options, const py::handle& given) {
         options.weights = named(weight_mode_from_string(std::string(py::str(given))), "weights",
                                 given, "'at_combine', 'at_expert', 'none'");
       }},
      {"row_alignment",
       [](ExchangeOptions& options, const py::handle& given) {
         options.row_alignment = number<int>("row_alignment", given);
       }},
      {"extra_bytes",
       [](ExchangeOptions& options, const py::handle& given) {
         options.extra_bytes = number<int>("extra_bytes", given);
       }},
      {"row_sources",
       [](ExchangeOptions& options, const py::handle& given) {
         options.row_sources = number<bool>("row_sources", given);
       }},
      {"wire_dispatch",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_dispatch = wire_named("wire_dispatch", given);
       }},
      {"wire_combine",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_combine = wire_named("wire_combine", given);
       }},
      {"wire_combine_backward",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_combine_backward = wire_named("wire_combine_backward", given);
       }},
      {"wire_dispatch_backward",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_dispatch_backward = wire_named("wire_dispatch_backward", given);
       }},
      {"wire_block_columns",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_block_columns = number<int>("wire_block_columns", given);
       }},
      {"max_relative_error",
       [](ExchangeOptions& options, const py::handle& given) {
         options.max_relative_error = static_cast<float>(limit_of(given));
       }},
      {"wire_sparse_ratio",
       [](ExchangeOptions& options, const py::handle& given) {
         options.wire_sparse_ratio = number<float>("wire_sparse_ratio", given);
       }},
      {"fragment_bytes",
       [](ExchangeOptions& options, const py::handle& given) {
         options.fragment_bytes = number<std::int64_t>("fragment_bytes", given);
       }},
      {"range_tokens",
       [](ExchangeOptions& options, const py::handle& given) {
         options.range_tokens = number<std::int64_t>("range_tokens", given);
       }},
      {"ranges_in_flight",
       [](ExchangeOptions& options, const py::handle& given) {
         options.ranges_in_flight = number<int>("ranges_in_flight", given);
       }},
      {"checksum_payload",
       [](ExchangeOptions& options, const py::handle& given) {
         options.checksum_payload = number<bool>("checksum_payload", given);
       }},
  };
  return setters;
}

}  // namespace

DType dtype_named(std::string_view option, const py::handle& given) {
  return named(
      py::isinstance<py::str>(given) ? dtype_from_string(given.cast<std::string>()) : std::nullopt,
      option, given, "'f32', 'bf16', 'f16'");
}

namespace {

/// "wire" and "link_bits_per_s", which are no options of an exchange: they choose some of those.
struct Automatic {
  bool wanted = false;
  double link_bits_per_s = 0;
  double max_relative_error = 0;  ///< rounded to FP32 it may be beyond a threshold

  /// Whether the name is no option of an exchange.
  bool take(std::string_view name, const py::handle& given) {
    if (name == "max_relative_error") max_relative_error = limit_of(given);
    if (name == "wire") {
      if (given.is_none()) return true;
      if (!py::isinstance<py::str>(given) || given.cast<std::string>() != "auto") {
        refuse_option(
            fmt::format("wire = {}; allowed: None, 'auto'; fix: name formats with wire_dispatch "
                        "and wire_combine",
                        std::string(py::repr(given))));
      }
      wanted = true;
      return true;
    }
    if (name != "link_bits_per_s") return false;
    link_bits_per_s = given.is_none() ? 0 : number<double>(name, given);
    if (!(link_bits_per_s >= 0)) {
      refuse_option(
          fmt::format("link_bits_per_s = {}; allowed: 0 (not known) or more", link_bits_per_s));
    }
    return true;
  }
};

/// All ranks must choose alike, so the fullest node decides what a rank can count on.
int most_ranks_of_a_node(const Topology& topology) {
  int most = 0;
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    most = std::max(most, topology.local_index(rank) + 1);
  }
  return most;
}

}  // namespace

ExchangeOptions options_of(const py::dict& given, DType dtype, const Topology& topology) {
  ExchangeOptions options;
  Automatic automatic;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (automatic.take(name, value)) continue;
    const auto setter = option_setters().find(name);
    if (setter == option_setters().end()) {
      refuse_option(fmt::format("{} is no option; fix: see help(ferry.Exchange)", name));
    }
    setter->second(options, value);
  }
  if (automatic.wanted) {
    return with_chosen_wires({.dtype = dtype,
                              .max_relative_error = automatic.max_relative_error,
                              .link_bytes_per_s_per_rank =
                                  automatic.link_bits_per_s / 8 / most_ranks_of_a_node(topology)},
                             options);
  }
  if (automatic.link_bits_per_s > 0) {
    refuse_option(
        "link_bits_per_s without wire = 'auto', which alone reads it; fix: leave it out, or add "
        "that");
  }
  return options;
}

py::dict chosen_wires(const py::handle& dtype, WireNeeds needs) {
  needs.dtype = dtype_named("dtype", dtype);
  const WireChoice choice = choose_wires(needs);
  const auto name = [](WireFormat format) { return std::string(to_string(format)); };
  py::dict made;
  made["wire_dispatch"] = name(choice.dispatch);
  made["wire_combine"] = name(choice.combine);
  made["wire_combine_backward"] = name(choice.combine_backward);
  made["wire_dispatch_backward"] = name(choice.dispatch_backward);
  made["max_relative_error"] = choice.max_relative_error;
  return made;
}

py::dict dict_of(const ExchangeOptions& options) {
  py::dict made;
  const auto name = [](auto value) { return std::string(to_string(value)); };
  made["strategy"] = name(options.strategy);
  made["layout"] = name(options.layout);
  made["weights"] = name(options.weights);
  made["row_alignment"] = options.row_alignment;
  made["extra_bytes"] = options.extra_bytes;
  made["row_sources"] = options.row_sources;
  made["wire_dispatch"] = name(*options.wire_dispatch);
  made["wire_combine"] = name(*options.wire_combine);
  made["wire_combine_backward"] = name(*options.wire_combine_backward);
  made["wire_dispatch_backward"] = name(*options.wire_dispatch_backward);
  made["wire_block_columns"] = options.wire_block_columns;
  made["max_relative_error"] = options.max_relative_error;
  made["wire_sparse_ratio"] = options.wire_sparse_ratio;
  made["fragment_bytes"] = options.fragment_bytes;
  made["range_tokens"] = options.range_tokens;
  made["ranges_in_flight"] = options.ranges_in_flight;
  made["checksum_payload"] = options.checksum_payload;
  return made;
}

}  // namespace ferry::python
