#pragma once
// Exchange::plan: sends this rank's routing to the nodes that need it, reads everybody's, compares
// their options, and makes this rank's plan.

#include <memory>
#include <vector>

#include "exchange/metadata_round.hpp"
#include "exchange/operation.hpp"
#include "ferry/routing.hpp"

namespace ferry::detail {

/// See Exchange::index_bounds. Requires: the routing was checked
std::vector<IndexBounds> find_index_bounds(const ExchangeState& exchange, const Routing& routing);

class PlanOperation final : public Operation {
 public:
  /// Requires: the routing was checked, or the operation is refused when it starts.
  PlanOperation(std::shared_ptr<ExchangeState> exchange, const Routing& routing);
  /// The plan of a dispatch that has its number already.
  PlanOperation(std::shared_ptr<ExchangeState> exchange, const Routing& routing,
                std::uint32_t plan_number);

  bool step() override;
  WaitTarget waits_for() const override;
  bool quiet() override;

  const std::shared_ptr<PlanState>& result() const { return result_; }
  /// The lanes on which this rank will send. Requires: it has its place, and took no step yet
  std::vector<plan::LanePair> prepare_lanes();

 private:
  void make_round();
  void split_routing();
  bool is_read(int node) const;
  /// What a plan is made of: the own memberships, and what another rank sent.
  const std::vector<plan::Membership>& own_for_plan() const;
  const plan::Membership& of_rank_for_plan(int source) const;
  wire::RowSummary summarise_rows() const;
  std::vector<std::byte> make_message(int node, const wire::RowSummary& summary);
  void encode_membership(int node, std::vector<std::byte>& message);
  MetadataRound::Note annotate(const wire::MetadataHeader& header, std::span<const std::byte> body);
  std::optional<std::string> decode_body(const wire::MetadataHeader& header,
                                         std::span<const std::byte> body);
  std::optional<Error> read_headers();
  plan::ColumnCounts read_counts() const;
  std::optional<Error> decode(int source);
  std::optional<Error> make_plan();
  std::vector<std::int32_t> copy_slots() const;
  std::optional<Error> describe_rows();

  const Routing routing_;
  /// From the first step to the last. Other ranks are decoded while annotating; the rest of them
  /// from node memory when they are needed.
  Spares<PlanInputs>::Handle inputs_;
  std::unique_ptr<MetadataRound> round_;
  std::vector<wire::MetadataHeader> headers_;
  std::vector<IndexSummary> indices_;  ///< of other nodes, ascending
  std::shared_ptr<PlanState> result_;
};

}  // namespace ferry::detail
