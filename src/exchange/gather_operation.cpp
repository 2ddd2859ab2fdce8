// all_gather and barrier: see gather_operation.hpp.

#include "exchange/gather_operation.hpp"

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

GatherOperation::GatherOperation(std::shared_ptr<ExchangeState> world,
                                 std::span<const std::byte> mine)
    : Operation(std::move(world), nullptr, wire::OpKind::gather) {
  wire::MetadataHeader header;
  header.call = call();
  header.source = static_cast<std::uint32_t>(engine().rank());
  header.body_bytes = mine.size();
  header.body_crc = kernels::crc32c(mine);
  std::vector<std::byte> message(wire::kMetadataHeaderBytes);
  wire::encode(header, std::span(message).first<wire::kMetadataHeaderBytes>());
  message.insert(message.end(), mine.begin(), mine.end());
  const Topology& topology = engine().transport().topology();
  round_ = std::make_unique<MetadataRound>(
      engine(), std::vector<std::vector<std::byte>>(topology.num_nodes(), message),
      [](const wire::MetadataHeader&, std::span<const std::byte>) {
        return MetadataRound::Note{};
      });
}

bool GatherOperation::step() {
  const bool advanced = round_->step(*this);
  if (!running() || !round_->complete(*this)) return advanced;
  for (int rank = 0; rank < engine().transport().topology().num_ranks(); ++rank) {
    const auto body = round_->message_of(rank).subspan(wire::kMetadataHeaderBytes);
    result_.emplace_back(body.begin(), body.end());
  }
  round_->retire(*this);
  succeed();
  return true;
}

bool GatherOperation::quiet() {
  round_->retire(*this);
  exchange().metadata.erase(call().use);
  return true;
}

}  // namespace ferry::detail
