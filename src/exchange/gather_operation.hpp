#pragma once
// all_gather and barrier: a metadata round whose messages are the caller's bytes.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "exchange/metadata_round.hpp"
#include "exchange/operation.hpp"

namespace ferry::detail {

class GatherOperation final : public Operation {
 public:
  GatherOperation(std::shared_ptr<ExchangeState> world, std::span<const std::byte> mine);

  bool step() override;
  WaitTarget waits_for() const override { return round_ ? round_->waits_for(*this) : WaitTarget{}; }
  bool quiet() override;

  /// By rank.
  std::vector<std::vector<std::byte>>& result() { return result_; }

 private:
  void make_round();

  std::vector<std::byte> message_;  ///< room for the header, then the caller's bytes
  std::unique_ptr<MetadataRound> round_;
  std::vector<std::vector<std::byte>> result_;
};

}  // namespace ferry::detail
