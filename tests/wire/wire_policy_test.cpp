// The table of docs/wire-formats.md "Choosing".

#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "ferry/error.hpp"
#include "ferry/wire_policy.hpp"

namespace ferry {
namespace {

constexpr WireFormat kF32 = WireFormat::f32;
constexpr WireFormat kBf16 = WireFormat::bf16;
constexpr WireFormat kF16 = WireFormat::f16;
constexpr WireFormat kInt8 = WireFormat::int8;

void expect_choice(const WireNeeds& needs, WireFormat dispatch, WireFormat combine,
                   WireFormat gradients) {
  const WireChoice choice = choose_wires(needs);
  EXPECT_EQ(choice.dispatch, dispatch);
  EXPECT_EQ(choice.combine, combine);
  EXPECT_EQ(choice.combine_backward, gradients);
  EXPECT_EQ(choice.dispatch_backward, gradients);
  const bool quantised = is_quantised(dispatch) || is_quantised(combine);
  EXPECT_EQ(choice.max_relative_error,
            quantised ? static_cast<float>(needs.max_relative_error) : 0.0F);
  EXPECT_FALSE(choice.reason.empty());
}

TEST(WirePolicy, FollowsItsTable) {
  expect_choice({.dtype = DType::f32}, kF32, kF32, kF32);
  expect_choice({.dtype = DType::f32, .max_relative_error = 0.0039}, kF32, kF32, kF32);
  expect_choice({.dtype = DType::f32, .max_relative_error = 0.004}, kBf16, kBf16, kBf16);
  expect_choice({.dtype = DType::f32, .max_relative_error = 0.004, .round_gradients = false}, kBf16,
                kBf16, kF32);
  expect_choice({.dtype = DType::bf16, .max_relative_error = 0.0079}, kBf16, kBf16, kBf16);
  expect_choice({.dtype = DType::f16, .max_relative_error = 0.01}, kInt8, kF16, kF16);
  expect_choice({.dtype = DType::f32, .max_relative_error = 0.01}, kInt8, kBf16, kBf16);
  expect_choice({.dtype = DType::bf16, .max_relative_error = 0.9, .quantise_combine = true}, kInt8,
                kInt8, kBf16);
  expect_choice({.max_relative_error = 0.01, .link_bytes_per_s_per_rank = 3e9}, kBf16, kBf16,
                kBf16);
  expect_choice({.max_relative_error = 0.01, .link_bytes_per_s_per_rank = 1e8}, kInt8, kBf16,
                kBf16);
}

TEST(WirePolicy, RefusesWhatIsNoErrorOrRate) {
  for (const double wrong : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(choose_wires({.max_relative_error = wrong}), Error);
  }
  EXPECT_THROW(choose_wires({.link_bytes_per_s_per_rank = -1}), Error);
}

TEST(WirePolicy, GoesIntoTheOptions) {
  ExchangeOptions options;
  choose_wires({.dtype = DType::f32, .max_relative_error = 0.02}).apply(options);
  EXPECT_EQ(options.wire_dispatch, kInt8);
  EXPECT_EQ(options.wire_combine, kBf16);
  EXPECT_EQ(options.wire_combine_backward, kBf16);
  EXPECT_EQ(options.wire_dispatch_backward, kBf16);
  EXPECT_EQ(options.max_relative_error, 0.02F);
}

TEST(WirePolicy, FillsInWhatIsUnset) {
  const ExchangeOptions all = with_chosen_wires({.dtype = DType::f32, .max_relative_error = 0.02},
                                                {.wire_dispatch_backward = kF32});
  EXPECT_EQ(all.wire_dispatch, kInt8);
  EXPECT_EQ(all.wire_combine, kBf16);
  EXPECT_EQ(all.wire_combine_backward, kBf16);
  EXPECT_EQ(all.wire_dispatch_backward, kF32);
  EXPECT_EQ(all.max_relative_error, 0.02F);
}

// Also where the choice itself would have needed none.
TEST(WirePolicy, ALimitStandsWhereverAFormatIsQuantised) {
  const auto limit_of = [](double limit, const ExchangeOptions& named) {
    return with_chosen_wires({.max_relative_error = limit}, named).max_relative_error;
  };
  for (const double limit : {0.003, 0.005, 0.02}) {
    for (const WireFormat wire : {kInt8, WireFormat::fp8_e4m3fn}) {
      const auto as_given = static_cast<float>(limit);
      EXPECT_EQ(limit_of(limit, {.wire_dispatch = wire}), as_given);
      EXPECT_EQ(limit_of(limit, {.wire_combine = wire}), as_given);
      EXPECT_EQ(limit_of(limit, {.wire_combine_backward = wire}), as_given);
      EXPECT_EQ(limit_of(limit, {.wire_dispatch_backward = wire}), as_given);
      EXPECT_EQ(limit_of(limit, {.wire_dispatch = kBf16, .wire_combine = wire}), as_given);
    }
    EXPECT_EQ(limit_of(limit, {.wire_dispatch = kBf16}), 0);
    EXPECT_EQ(limit_of(limit, {.wire_dispatch = WireFormat::sparse_bf16}), 0);
  }
  EXPECT_EQ(limit_of(0, {.wire_dispatch = kInt8}), 0);
}

TEST(WirePolicy, RefusesALimitBesideRowsThatAreThinnedOut) {
  const ExchangeOptions thinned{.wire_dispatch = WireFormat::sparse_f16, .wire_sparse_ratio = 0.5};
  try {
    with_chosen_wires({.max_relative_error = 0.02}, thinned);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    const std::string text = error.what();
    for (const char* option :
         {"max_relative_error = 0.02", "wire_sparse_ratio = 0.5", "wire_dispatch = sparse_f16"}) {
      EXPECT_NE(text.find(option), std::string::npos) << text;
    }
  }
  EXPECT_EQ(with_chosen_wires({}, thinned).wire_dispatch, WireFormat::sparse_f16);
}

}  // namespace
}  // namespace ferry
