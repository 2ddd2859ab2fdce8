#pragma once
// Options of an exchange as Python gives and reads them: a dict of names and numbers.

#include <pybind11/pybind11.h>

#include <string_view>

#include "ferry/exchange.hpp"
#include "ferry/topology.hpp"
#include "ferry/wire_policy.hpp"

namespace ferry::python {

/// Throws: InvalidArgumentError for what names no dtype of rows
DType dtype_named(std::string_view option, const pybind11::handle& given);
/// With `wire = "auto"` formats that are unset are chosen: ferry::with_chosen_wires.
/// Throws: InvalidArgumentError for an unknown name, or a value that its option cannot hold
ExchangeOptions options_of(const pybind11::dict& given, DType dtype, const Topology& topology);
/// The options that ferry::choose_wires gives. Throws: InvalidArgumentError
pybind11::dict chosen_wires(const pybind11::handle& dtype, WireNeeds needs);
/// All options. Requires: wire formats are filled in, as Exchange::options() does
pybind11::dict dict_of(const ExchangeOptions& options);

}  // namespace ferry::python
