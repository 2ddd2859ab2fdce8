// Exchange::plan: see plan_operation.hpp.

#include "exchange/plan_operation.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"
#include "plan/row_sources.hpp"
#include "wire/membership_choice.hpp"

namespace ferry::detail {
namespace {

wire::MembershipForm membership_form(const ExchangeState& exchange, int node) {
  return {.num_columns = exchange.experts.num_columns(node),
          .slots = exchange.options.row_sources,
          .weights = exchange.options.weights != WeightMode::none};
}

/// Lists that stay in node memory are written for speed.
constexpr wire::IndexEncoding kInsideNode{ListEncoding::bitmask, ListEncoding::raw};

void split(const ExchangeState& exchange, const Routing& routing,
           std::vector<plan::Membership>& own) {
  const ExchangeOptions& options = exchange.options;
  plan::split_by_node(routing, exchange.experts,
                      {.num_nodes = exchange.engine.transport().topology().num_nodes(),
                       .slots = options.row_sources},
                      own);
  if (options.weights != WeightMode::none) return;
  for (plan::Membership& membership : own) std::ranges::fill(membership.weights, 1.0F);
}

}  // namespace

std::vector<IndexBounds> find_index_bounds(const ExchangeState& exchange, const Routing& routing) {
  std::vector<plan::Membership> own;
  split(exchange, routing, own);
  std::vector<IndexBounds> bounds;
  for (int node = 0; node < static_cast<int>(own.size()); ++node) {
    if (node == exchange.engine.transport().node()) continue;
    const plan::Membership& membership = own[node];
    const wire::MembershipForm form = membership_form(exchange, node);
    bounds.push_back(
        {.best_bytes = wire::index_bytes(membership, form, wire::best_encoding(membership, form)),
         .entropy_bytes = wire::index_entropy_bits(membership, form) / 8});
  }
  return bounds;
}

PlanOperation::PlanOperation(std::shared_ptr<ExchangeState> exchange, const Routing& routing)
    : Operation(std::move(exchange), wire::OpKind::plan, PlanUse::opens), routing_(routing) {}

PlanOperation::PlanOperation(std::shared_ptr<ExchangeState> exchange, const Routing& routing,
                             std::uint32_t plan_number)
    : Operation(std::move(exchange), wire::OpKind::plan, PlanUse::joins, plan_number),
      routing_(routing) {}

void PlanOperation::make_round() {
  ++exchange().metadata_rounds;
  const Topology& topology = engine().transport().topology();
  inputs_ = engine().plan_memory().inputs->take();
  inputs_->decoded.resize(static_cast<std::size_t>(topology.num_ranks()));
  for (PlanInputs::Decoded& decoded : inputs_->decoded) decoded.there = false;
  split_routing();
  const wire::RowSummary summary = summarise_rows();
  std::vector<std::vector<std::byte>> messages;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    messages.push_back(make_message(node, summary));
  }
  round_ = std::make_unique<MetadataRound>(
      engine(), std::move(messages),
      [this](const wire::MetadataHeader& header, std::span<const std::byte> body) {
        return annotate(header, body);
      });
}

void PlanOperation::split_routing() {
  const Topology& topology = engine().transport().topology();
  split(exchange(), routing_, inputs_->own);
  inputs_->own_grouped.resize(exchange().token_major() ? inputs_->own.size() : 0);
  for (std::size_t node = 0; node < inputs_->own_grouped.size(); ++node) {
    plan::group_by_rank(inputs_->own[node],
                        plan::local_ranks(exchange().experts, topology, static_cast<int>(node)),
                        inputs_->own_grouped[node]);
  }
}

// Ranks of the own node take part in nothing but the counts, unless they describe their rows.
bool PlanOperation::is_read(int node) const {
  return node != engine().transport().node() || exchange().options.row_sources;
}

const std::vector<plan::Membership>& PlanOperation::own_for_plan() const {
  return exchange().token_major() ? inputs_->own_grouped : inputs_->own;
}

const plan::Membership& PlanOperation::of_rank_for_plan(int source) const {
  const PlanInputs::Decoded& decoded = inputs_->decoded[source];
  return exchange().token_major() ? decoded.grouped : decoded.membership;
}

// Rows that each strategy would send to each node: what a choice among them needs to know.
wire::RowSummary PlanOperation::summarise_rows() const {
  const Topology& topology = engine().transport().topology();
  wire::RowSummary summary;
  if (topology.num_nodes() == 1 && !is_read(0)) return summary;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const plan::Membership& membership = inputs_->own[node];
    const std::uint64_t rank_rows =
        plan::count_rank_rows(membership, plan::local_ranks(exchange().experts, topology, node));
    summary.rows_to_node.push_back({membership.num_entries(), rank_rows, membership.tokens.size()});
  }
  return summary;
}

std::vector<std::byte> PlanOperation::make_message(int node, const wire::RowSummary& summary) {
  std::vector<std::byte> message(wire::kMetadataHeaderBytes);
  if (is_read(node)) {
    wire::encode_row_summary(summary, message);
    encode_membership(node, message);
  }
  const auto body = std::span<const std::byte>(message).subspan(wire::kMetadataHeaderBytes);
  wire::MetadataHeader header;
  header.call = call();
  header.source = static_cast<std::uint32_t>(engine().rank());
  header.failures_digest = exchange().failures.digest();
  header.num_tokens = static_cast<std::uint64_t>(routing_.num_tokens);
  header.options = exchange().shared_options(routing_.num_topk);
  header.body_bytes = body.size();
  header.body_crc = kernels::crc32c(body);
  wire::encode(header, std::span(message).first<wire::kMetadataHeaderBytes>());
  return message;
}

void PlanOperation::encode_membership(int node, std::vector<std::byte>& message) {
  const plan::Membership& membership = inputs_->own[node];
  const wire::MembershipForm form = membership_form(exchange(), node);
  if (node == engine().transport().node()) {
    wire::encode_membership(membership, form, kInsideNode, message);
    return;
  }
  const wire::IndexEncoding chosen =
      wire::choose_encoding(membership, form, exchange().index_histories[node]);
  indices_.push_back({.node = node,
                      .tokens = chosen.tokens,
                      .experts = chosen.experts,
                      .bytes = wire::encode_membership(membership, form, chosen, message)});
}

// Counts the rows of a message per expert of this node. Where the sender's options differ nothing
// is decoded: every rank finds the difference in the headers.
MetadataRound::Note PlanOperation::annotate(const wire::MetadataHeader& header,
                                            std::span<const std::byte> body) {
  if (header.options != exchange().shared_options(routing_.num_topk)) return {};
  const int node = engine().transport().node();
  const plan::Membership* membership = &own_for_plan()[node];
  if (header.source != static_cast<std::uint32_t>(engine().rank())) {
    if (const auto problem = decode_body(header, body)) {
      return {{},
              Error(ErrorCode::corrupt_message, fmt::format("{}: metadata of rank {}: {}",
                                                            describe(), header.source, *problem))};
    }
    membership = &of_rank_for_plan(static_cast<int>(header.source));
  }
  const std::vector<std::uint32_t> counts =
      plan::count_columns(*membership, exchange().row_owners.num_columns(node));
  MetadataRound::Note note;
  note.bytes.resize(counts.size() * sizeof(std::uint32_t));
  if (!counts.empty()) std::memcpy(note.bytes.data(), counts.data(), note.bytes.size());
  return note;
}

std::optional<std::string> PlanOperation::decode_body(const wire::MetadataHeader& header,
                                                      std::span<const std::byte> body) {
  const std::uint64_t most_tokens = engine().limits().num_tokens_limit;
  if (header.num_tokens > most_tokens) {
    return fmt::format(
        "num_tokens is {}; allowed: {}; fix: set num_tokens_limit alike on all ranks",
        header.num_tokens, most_tokens);
  }
  const Topology& topology = engine().transport().topology();
  wire::RowSummary summary;
  if (auto problem = wire::decode_row_summary(body, topology.num_nodes(), summary)) return problem;
  const wire::MembershipLimits limits{
      .num_tokens = header.num_tokens,
      .num_topk = routing_.num_topk,
      .form = membership_form(exchange(), engine().transport().node())};
  PlanInputs::Decoded& decoded = inputs_->decoded[header.source];
  if (auto problem = wire::decode_membership(body, limits, decoded.membership)) return problem;
  if (exchange().token_major()) {
    plan::group_by_rank(
        decoded.membership,
        plan::local_ranks(exchange().experts, topology, engine().transport().node()),
        decoded.grouped);
  }
  decoded.there = true;
  return std::nullopt;
}

bool PlanOperation::step() {
  if (!round_) make_round();
  const bool advanced = round_->step(*this);
  if (!running() || !round_->complete(*this)) return advanced;
  // All ranks read the same headers, so each finds the same difference by itself.
  if (const auto error = read_headers()) {
    fail(*error);
    return true;
  }
  if (const auto error = make_plan()) {
    engine().refuse(*this, *error);
    return true;
  }
  round_->finish(*this);
  inputs_.reset();
  succeed();
  return true;
}

std::optional<Error> PlanOperation::read_headers() {
  const int num_ranks = engine().transport().topology().num_ranks();
  headers_.resize(static_cast<std::size_t>(num_ranks));
  std::vector<std::uint16_t> digests;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto message = round_->message_of(rank);
    const auto problem = wire::decode(
        message.first(std::min(message.size(), wire::kMetadataHeaderBytes)), headers_[rank]);
    if (problem) return Error(ErrorCode::corrupt_message, *problem);
    digests.push_back(headers_[rank].failures_digest);
    if (rank == 0) continue;
    if (const auto difference =
            wire::find_difference(headers_[0].options, 0, headers_[rank].options, rank)) {
      return Error(ErrorCode::mismatch,
                   fmt::format("plan (call {} of exchange {}): {}; fix: make the exchange with the "
                               "same options on all ranks",
                               wire::place_text(call().place), call().exchange, *difference));
    }
  }
  exchange().failures.compare(digests);
  return std::nullopt;
}

plan::ColumnCounts PlanOperation::read_counts() const {
  const int num_ranks = engine().transport().topology().num_ranks();
  plan::ColumnCounts counts;
  counts.num_columns = exchange().row_owners.num_columns(engine().transport().node());
  counts.values.resize(static_cast<std::size_t>(num_ranks) * counts.num_columns);
  for (int source = 0; source < num_ranks; ++source) {
    const auto note = round_->note_of(source);
    if (note.empty()) continue;
    std::memcpy(counts.values.data() + static_cast<std::size_t>(source) * counts.num_columns,
                note.data(), note.size());
  }
  return counts;
}

std::optional<Error> PlanOperation::decode(int source) {
  if (inputs_->decoded[source].there) return std::nullopt;
  const auto body = round_->message_of(source).subspan(wire::kMetadataHeaderBytes);
  const auto problem = decode_body(headers_[source], body);
  if (!problem) return std::nullopt;
  return Error(ErrorCode::corrupt_message, *problem);
}

std::vector<plan::LanePair> PlanOperation::prepare_lanes() {
  make_round();
  return plan::make_outgoing(exchange().plan_context(routing_.num_topk), engine().rank(),
                             own_for_plan());
}

std::optional<Error> PlanOperation::make_plan() {
  const Topology& topology = engine().transport().topology();
  const int node = engine().transport().node();
  const std::vector<plan::Membership>& own = own_for_plan();
  const plan::ColumnCounts counts = read_counts();
  const plan::PlanContext context = exchange().plan_context(routing_.num_topk);
  std::vector<const plan::Membership*> of_sources(topology.num_ranks(), nullptr);
  for (int source = 0; source < topology.num_ranks(); ++source) {
    if (!plan::needs_membership(context, engine().rank(), source, counts)) continue;
    if (source == engine().rank()) {
      of_sources[source] = &own[node];
      continue;
    }
    if (const auto error = decode(source)) return error;
    of_sources[source] = &of_rank_for_plan(source);
  }
  auto rows = engine().plan_memory().plans->take();
  plan::make_rank_plan(context, engine().rank(), {own, of_sources, counts}, *rows);
  result_ = std::make_shared<PlanState>(exchange(), std::move(rows),
                                        PlanState::Made{.number = call().plan,
                                                        .num_topk = routing_.num_topk,
                                                        .metadata_bytes = round_->sent_bytes(),
                                                        .slot_experts = copy_slots(),
                                                        .indices = indices_});
  if (exchange().options.row_sources) {
    if (const auto error = describe_rows()) return error;
  }
  engine().adopt_plan(exchange(), result_);
  return std::nullopt;
}

// Gradients of weights go to slots, and the caller's routing may be gone by then.
std::vector<std::int32_t> PlanOperation::copy_slots() const {
  if (exchange().options.weights == WeightMode::none) return {};
  const auto count = static_cast<std::ptrdiff_t>(routing_.num_tokens) * routing_.num_topk;
  if (routing_.topk_idx64.empty()) {
    return {routing_.topk_idx32.begin(), routing_.topk_idx32.begin() + count};
  }
  return {routing_.topk_idx64.begin(), routing_.topk_idx64.begin() + count};
}

// Reads the memberships of all ranks for this node, also of those whose rows others push.
std::optional<Error> PlanOperation::describe_rows() {
  const int num_ranks = engine().transport().topology().num_ranks();
  std::vector<const plan::Membership*> of_sources;
  for (int source = 0; source < num_ranks; ++source) {
    if (source == engine().rank()) {
      of_sources.push_back(&inputs_->own[engine().transport().node()]);
      continue;
    }
    if (const auto error = decode(source)) return error;
    of_sources.push_back(&inputs_->decoded[source].membership);
  }
  const plan::RowContext context{exchange().experts, engine().rank(), of_sources};
  if (!exchange().token_major()) {
    result_->row_sources = plan::expert_major_sources(context, result_->rows.expert_offsets);
    return std::nullopt;
  }
  plan::TokenRows rows = plan::token_major_rows(context, routing_.num_topk);
  result_->row_sources = std::move(rows.sources);
  result_->topk_idx = std::move(rows.topk_idx);
  result_->topk_weights = std::move(rows.topk_weights);
  result_->expert_counts = std::move(rows.expert_counts);
  return std::nullopt;
}

WaitTarget PlanOperation::waits_for() const {
  return round_ ? round_->waits_for(*this) : WaitTarget{};
}

bool PlanOperation::quiet() {
  if (round_) round_->finish(*this);
  exchange().metadata.erase(call().plan);
  std::erase_if(exchange().early,
                [this](const ExchangeState::Early& early) { return early.plan == call().plan; });
  return true;
}

}  // namespace ferry::detail
