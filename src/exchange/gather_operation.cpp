// all_gather and barrier: see gather_operation.hpp.

#include "exchange/gather_operation.hpp"

#include <algorithm>

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

GatherOperation::GatherOperation(std::shared_ptr<ExchangeState> world,
                                 std::span<const std::byte> mine)
    : Operation(std::move(world), wire::OpKind::gather, PlanUse::opens),
      message_(wire::kMetadataHeaderBytes + mine.size()) {
  std::ranges::copy(mine, message_.begin() + wire::kMetadataHeaderBytes);
}

void GatherOperation::make_round() {
  const auto body = std::span<const std::byte>(message_).subspan(wire::kMetadataHeaderBytes);
  wire::MetadataHeader header;
  header.call = call();
  header.source = static_cast<std::uint32_t>(engine().rank());
  header.failures_digest = exchange().failures.digest();
  header.body_bytes = body.size();
  header.body_crc = kernels::crc32c(body);
  wire::encode(header, std::span(message_).first<wire::kMetadataHeaderBytes>());
  const Topology& topology = engine().transport().topology();
  round_ = std::make_unique<MetadataRound>(
      engine(), std::vector<std::vector<std::byte>>(topology.num_nodes(), message_),
      [](const wire::MetadataHeader&, std::span<const std::byte>) {
        return MetadataRound::Note{};
      });
  message_.clear();
}

bool GatherOperation::step() {
  if (!round_) make_round();
  const bool advanced = round_->step(*this);
  if (!running() || !round_->complete(*this)) return advanced;
  for (int rank = 0; rank < engine().transport().topology().num_ranks(); ++rank) {
    const auto body = round_->message_of(rank).subspan(wire::kMetadataHeaderBytes);
    result_.emplace_back(body.begin(), body.end());
  }
  round_->finish(*this);
  succeed();
  return true;
}

bool GatherOperation::quiet() {
  if (round_) round_->finish(*this);
  exchange().metadata.erase(call().plan);
  return true;
}

}  // namespace ferry::detail
