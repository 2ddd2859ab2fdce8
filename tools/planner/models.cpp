// The table of models. Figures are those of each model's published config.json: hidden_size, the
// number of routed experts, experts per token, and n_group and topk_group where there is a limit.
#include "planner/models.hpp"

#include <array>

#include <fmt/format.h>

#include "common/failures.hpp"

namespace ferry::planner {
namespace {

const std::array<Model, 5>& model_table() {
  static const std::array<Model, 5> kModels{{
      // n_routed_experts 256, num_experts_per_tok 8, n_group 8, topk_group 4
      {.name = "deepseek-v3",
       .hidden = 7168,
       .num_experts = 256,
       .num_topk = 8,
       .num_groups = 8,
       .groups_per_token = 4,
       .source = "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json"},
      // n_routed_experts 64, num_experts_per_tok 6, n_group 1
      {.name = "deepseek-v2-lite",
       .hidden = 2048,
       .num_experts = 64,
       .num_topk = 6,
       .source = "https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite/blob/main/config.json"},
      // num_experts 128, num_experts_per_tok 8
      {.name = "qwen3-235b",
       .hidden = 4096,
       .num_experts = 128,
       .num_topk = 8,
       .source = "https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json"},
      // num_local_experts 8, num_experts_per_tok 2
      {.name = "mixtral-8x7b",
       .hidden = 4096,
       .num_experts = 8,
       .num_topk = 2,
       .source = "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json"},
      // num_local_experts 32, num_experts_per_tok 4
      {.name = "gpt-oss-20b",
       .hidden = 2880,
       .num_experts = 32,
       .num_topk = 4,
       .source = "https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json"},
  }};
  return kModels;
}

}  // namespace

tools::RoutingPattern Model::routing() const {
  if (num_groups == 1) return {};
  return {.kind = tools::RoutingPattern::Kind::group,
          .num_groups = num_groups,
          .groups_per_token = groups_per_token};
}

std::span<const Model> models() { return model_table(); }

const Model& model_of(const std::string& name) {
  std::string names;
  for (const Model& model : models()) {
    if (model.name == name) return model;
    if (!names.empty()) names += ", ";
    names += model.name;
  }
  throw tools::UsageError(
      fmt::format("--model {}: no such model; allowed: {}; fix: name one of "
                  "them, or give --trace DIR, whose files say what is routed",
                  name, names));
}

}  // namespace ferry::planner
