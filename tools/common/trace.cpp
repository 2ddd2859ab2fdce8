// Loading is strict: a trace that does not say what it is would give figures that mean nothing.
#include "common/trace.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "common/failures.hpp"

namespace ferry::tools {
namespace {

constexpr int kMaxTopk = 64;
constexpr std::int64_t kMaxTraceExperts = 1 << 20;

nlohmann::json read_meta(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) {
    throw EnvironmentError(
        fmt::format("{}: cannot be read; a trace is a directory with "
                    "topk_idx.npy, meta.json and optionally topk_weights.npy; "
                    "fix: check the path after --trace",
                    path.string()));
  }
  nlohmann::json meta = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!meta.is_object()) {
    throw EnvironmentError(
        fmt::format("{}: is not a JSON object; fix: see num_experts, hidden, "
                    "sequence_lengths of an intact trace",
                    path.string()));
  }
  return meta;
}

/// An integer of meta.json in [low, high]; nothing when the key is not there.
std::optional<std::int64_t> meta_integer(const nlohmann::json& meta,
                                         const std::filesystem::path& path, const char* key,
                                         std::int64_t low) {
  const auto found = meta.find(key);
  if (found == meta.end()) return std::nullopt;
  const bool fits = found->is_number_integer() && found->get<std::int64_t>() >= low &&
                    found->get<std::int64_t>() <= kMaxTraceExperts;
  if (!fits) {
    throw EnvironmentError(fmt::format("{}: {} = {}; allowed: {}..{}; fix: correct meta.json",
                                       path.string(), key, found->dump(), low, kMaxTraceExperts));
  }
  return found->get<std::int64_t>();
}

std::vector<std::int64_t> meta_sequences(const nlohmann::json& meta,
                                         const std::filesystem::path& path,
                                         std::int64_t num_tokens) {
  const auto found = meta.find("sequence_lengths");
  if (found == meta.end()) return {num_tokens};
  std::vector<std::int64_t> lengths;
  std::int64_t total = 0;
  bool good = found->is_array();
  for (std::size_t i = 0; good && i < found->size(); ++i) {
    const nlohmann::json& value = (*found)[i];
    good = value.is_number_integer() && value.get<std::int64_t>() >= 0 &&
           value.get<std::int64_t>() <= num_tokens - total;
    if (good) {
      lengths.push_back(value.get<std::int64_t>());
      total += lengths.back();
    }
  }
  if (!good || total != num_tokens) {
    throw EnvironmentError(fmt::format(
        "{}: sequence_lengths must be lengths >= 0 that add up to the {} tokens of topk_idx.npy; "
        "fix: correct meta.json, or leave the key out for one sequence",
        path.string(), num_tokens));
  }
  return lengths;
}

void check_idx_shape(const NpyArray& idx, const std::filesystem::path& path) {
  if (idx.kind == NpyKind::floating || idx.shape.size() != 3 || idx.shape[1] < 1 ||
      idx.shape[2] < 1 || idx.shape[2] > kMaxTopk) {
    throw EnvironmentError(fmt::format(
        "{}: shape {}{}; allowed: integers [num_tokens, num_layers, num_topk] with 1..{} top-k; "
        "fix: store the router's choices in that order",
        path.string(), idx.describe_shape(), idx.kind == NpyKind::floating ? " of floats" : "",
        kMaxTopk));
  }
}

void check_weights_shape(const NpyArray& weights, const NpyArray& idx,
                         const std::filesystem::path& path) {
  if (weights.kind != NpyKind::floating || weights.item_bytes != sizeof(float) ||
      weights.shape != idx.shape) {
    throw EnvironmentError(fmt::format(
        "{}: shape {}; allowed: float32 of the shape of topk_idx.npy, {}; fix: save the weights "
        "as float32, or remove the file for weight 1/num_topk each",
        path.string(), weights.describe_shape(), idx.describe_shape()));
  }
}

}  // namespace

Trace Trace::load(const std::filesystem::path& directory) {
  Trace trace;
  trace.directory_ = directory;
  const std::filesystem::path meta_path = directory / "meta.json";
  const nlohmann::json meta = read_meta(meta_path);
  const std::filesystem::path idx_path = directory / "topk_idx.npy";
  trace.topk_idx_ = read_npy(idx_path);
  check_idx_shape(trace.topk_idx_, idx_path);
  const std::filesystem::path weights_path = directory / "topk_weights.npy";
  if (std::filesystem::exists(weights_path)) {
    trace.topk_weights_ = read_npy(weights_path);
    check_weights_shape(*trace.topk_weights_, trace.topk_idx_, weights_path);
  }

  TraceInfo& info = trace.info_;
  const auto model = meta.find("model");
  info.model = model != meta.end() && model->is_string() ? model->get<std::string>()
                                                         : directory.filename().string();
  const auto domain = meta.find("domain");
  if (domain != meta.end() && domain->is_string()) info.domain = domain->get<std::string>();
  const std::optional<std::int64_t> num_experts = meta_integer(meta, meta_path, "num_experts", 1);
  if (!num_experts) {
    throw EnvironmentError(
        fmt::format("{}: has no num_experts; fix: add the number of experts of "
                    "one layer",
                    meta_path.string()));
  }
  info.num_experts = static_cast<int>(*num_experts);
  info.hidden = meta_integer(meta, meta_path, "hidden", 1).value_or(0);
  info.num_tokens = trace.topk_idx_.shape[0];
  info.num_layers = static_cast<int>(trace.topk_idx_.shape[1]);
  info.num_topk = static_cast<int>(trace.topk_idx_.shape[2]);
  info.sequence_lengths = meta_sequences(meta, meta_path, info.num_tokens);
  return trace;
}

TraceLayer Trace::layer(int index) const {
  if (index < 0 || index >= info_.num_layers) {
    throw UsageError(fmt::format("--layer {}: {} has the layers 0..{}; fix: name one of them",
                                 index, directory_.string(), info_.num_layers - 1));
  }
  TraceLayer layer;
  const auto num_values = static_cast<std::size_t>(info_.num_tokens * info_.num_topk);
  layer.topk_idx.reserve(num_values);
  if (topk_weights_) layer.topk_weights.reserve(num_values);
  for (std::int64_t token = 0; token < info_.num_tokens; ++token) {
    for (int slot = 0; slot < info_.num_topk; ++slot) {
      const std::int64_t at = (token * info_.num_layers + index) * info_.num_topk + slot;
      const std::int64_t expert = topk_idx_.integer(at);
      if (expert < -1 || expert >= info_.num_experts) {
        throw EnvironmentError(fmt::format(
            "{}: topk_idx[{},{},{}] = {} is not an expert; allowed: -1 (none) or 0..{}, because "
            "num_experts = {}; fix: correct meta.json or the array",
            directory_.string(), token, index, slot, expert, info_.num_experts - 1,
            info_.num_experts));
      }
      layer.topk_idx.push_back(static_cast<std::int32_t>(expert));
      if (!topk_weights_) continue;
      const double weight = topk_weights_->number(at);
      if (!std::isfinite(weight)) {
        throw EnvironmentError(fmt::format(
            "{}: topk_weights[{},{},{}] = {} is not a finite number; fix: correct the array",
            directory_.string(), token, index, slot, weight));
      }
      layer.topk_weights.push_back(static_cast<float>(weight));
    }
  }
  return layer;
}

std::vector<TokenShare> split_sequences(const std::vector<std::int64_t>& sequence_lengths,
                                        const std::vector<std::int64_t>& limits) {
  const auto num_ranks = static_cast<std::int64_t>(limits.size());
  const std::int64_t total =
      std::accumulate(sequence_lengths.begin(), sequence_lengths.end(), std::int64_t{0});
  std::vector<TokenShare> shares(limits.size());
  std::vector<std::vector<std::int64_t>> ends(limits.size());
  std::int64_t first = 0;
  for (const std::int64_t length : sequence_lengths) {
    if (length == 0) continue;
    // The rank whose even share holds the middle of the sequence: consecutive, and near even.
    const auto rank = static_cast<std::size_t>((2 * first + length) * num_ranks / (2 * total));
    TokenShare& share = shares[rank];
    if (share.num_tokens == 0) share.first_token = first;
    share.num_tokens += length;
    ends[rank].push_back(share.num_tokens);
    first += length;
  }
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    TokenShare& share = shares[rank];
    if (limits[rank] < 0 || share.num_tokens <= limits[rank]) continue;
    share.num_tokens = limits[rank];
    share.cut =
        limits[rank] > 0 && !std::binary_search(ends[rank].begin(), ends[rank].end(), limits[rank]);
  }
  return shares;
}

}  // namespace ferry::tools
