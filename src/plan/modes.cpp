// Names of layouts and weight modes for options and messages.

#include <array>
#include <utility>

#include "ferry/options.hpp"

namespace ferry {
namespace {

template <typename Mode, std::size_t kCount>
using Names = std::array<std::pair<Mode, std::string_view>, kCount>;

constexpr Names<Layout, 2> kLayouts{
    {{Layout::expert_major, "expert_major"}, {Layout::token_major, "token_major"}}};
constexpr Names<WeightMode, 3> kWeightModes{{{WeightMode::at_combine, "at_combine"},
                                             {WeightMode::at_expert, "at_expert"},
                                             {WeightMode::none, "none"}}};

template <typename Mode, std::size_t kCount>
std::string_view name_of(const Names<Mode, kCount>& names, Mode mode) {
  for (const auto& [known, name] : names) {
    if (known == mode) return name;
  }
  return "unknown";
}

template <typename Mode, std::size_t kCount>
std::optional<Mode> mode_of(const Names<Mode, kCount>& names, std::string_view wanted) {
  for (const auto& [mode, name] : names) {
    if (name == wanted) return mode;
  }
  return std::nullopt;
}

}  // namespace

std::string_view to_string(Layout layout) { return name_of(kLayouts, layout); }
std::optional<Layout> layout_from_string(std::string_view name) { return mode_of(kLayouts, name); }

std::string_view to_string(WeightMode weights) { return name_of(kWeightModes, weights); }
std::optional<WeightMode> weight_mode_from_string(std::string_view name) {
  return mode_of(kWeightModes, name);
}

}  // namespace ferry
