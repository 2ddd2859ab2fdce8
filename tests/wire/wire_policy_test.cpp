// The table of docs/wire-formats.md "Choosing".

#include <limits>

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

}  // namespace
}  // namespace ferry
