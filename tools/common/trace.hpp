#pragma once
// A routing trace on disk: what a real model's router chose, layer by layer, on real text. One
// directory with topk_idx.npy, optionally topk_weights.npy, and meta.json.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "common/npy.hpp"

namespace ferry::tools {

/// What is common to all layers, checked against the arrays.
struct TraceInfo {
  std::string model;
  std::string domain;  ///< of the text; empty when meta.json does not say
  int num_experts = 0;
  std::int64_t hidden = 0;  ///< 0 when meta.json does not say
  std::int64_t num_tokens = 0;
  int num_layers = 0;
  int num_topk = 0;
  std::vector<std::int64_t> sequence_lengths;  ///< consecutive blocks of tokens
};

/// One layer: the first shapes are [num_tokens, num_topk].
struct TraceLayer {
  std::vector<std::int32_t> topk_idx;  ///< -1 = no expert
  std::vector<float> topk_weights;     ///< empty when the trace has none
};

class Trace {
 public:
  /// Errors: EnvironmentError that names file, place, value, what is allowed and the fix.
  static Trace load(const std::filesystem::path& directory);

  const TraceInfo& info() const { return info_; }
  /// Errors: UsageError when the trace has no such layer; EnvironmentError for an id that is no
  ///         expert or a weight that is no number.
  TraceLayer layer(int index) const;

 private:
  std::filesystem::path directory_;
  TraceInfo info_;
  NpyArray topk_idx_;
  std::optional<NpyArray> topk_weights_;
};

/// The tokens of a trace that one rank works on: [first_token, first_token + num_tokens).
struct TokenShare {
  std::int64_t first_token = 0;
  std::int64_t num_tokens = 0;
  bool cut = false;  ///< the last sequence is not whole, because of the limit
};

/// Gives each rank whole sequences, consecutive ones, as even in tokens as their lengths allow;
/// then cuts each rank at its limit. Requires: one limit per rank; negative = no limit.
std::vector<TokenShare> split_sequences(const std::vector<std::int64_t>& sequence_lengths,
                                        const std::vector<std::int64_t>& limits);

}  // namespace ferry::tools
