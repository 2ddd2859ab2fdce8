#pragma once
// Headers of messages between ranks: fixed size, little endian, checksummed; byte by byte in
// docs/wire-formats.md. A header that fails a check is refused with a text that names the field,
// the value and what was expected.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/error.hpp"
#include "ferry/options.hpp"
#include "ferry/wire_format.hpp"

namespace ferry::wire {

inline constexpr std::uint16_t kVersion = 1;

enum class MessageType : std::uint16_t { fragment = 1, metadata = 2, grant = 3, poison = 4 };

enum class OpKind : std::uint8_t {
  plan = 0,
  dispatch = 1,
  combine = 2,
  combine_backward = 3,
  dispatch_backward = 4,
  gather = 5,  ///< all_gather and barrier of a transport
  // With gradients of the routing weights, which all ranks must want: another call.
  combine_backward_weights = 6,
  dispatch_backward_weights = 7,
};
inline constexpr OpKind kLastOpKind = OpKind::dispatch_backward_weights;
std::string_view to_string(OpKind kind);

/// What the fragments of a call hold: its rows, or FP32 numbers that go back with or for them.
enum class Stream : std::uint8_t { rows = 0, values = 1 };

/// How the rows of a fragment stand in its payload.
enum class RowPacking : std::uint8_t {
  plain = 0,   ///< one behind the other, all of one size
  marked = 1,  ///< of two sizes; a bit for each row says which
  // Values that are not 0, and where they are: see kernels::Positions.
  coo = 2,
  bitmask = 3,
  run_length = 4,
};
inline constexpr RowPacking kLastRowPacking = RowPacking::run_length;

/// These make a plan number; all others work on a plan that exists.
constexpr bool opens_plan(OpKind kind) { return kind == OpKind::plan || kind == OpKind::gather; }

/// Says how many fragments of one use a sender may have sent in all. `fragments` = 0: no grant.
struct Grant {
  std::uint32_t exchange = 0;
  std::uint32_t plan = 0;
  std::uint32_t ordinal = 0;    ///< which use of (plan, kind), from 0
  std::uint32_t fragments = 0;  ///< cumulative in that use
  OpKind kind = OpKind::dispatch;
  Stream stream = Stream::rows;
  bool operator==(const Grant&) const = default;
};

/// Which call a message belongs to. (exchange, plan, kind, ordinal) name it; its place is there to
/// find ranks that make their calls in different orders.
struct CallId {
  std::uint32_t generation = 0;  ///< of the group
  std::uint32_t exchange = 0;
  std::uint64_t place = 0;  ///< in the order of calls: plans opened before << 32 | calls since
  std::uint32_t plan = 0;
  std::uint32_t ordinal = 0;  ///< which use of (plan, kind), from 0
  OpKind kind = OpKind::plan;
  /// Its rank may have left out calls on a plan that failed, so its place compares with no other.
  bool after_failure = false;
  bool operator==(const CallId&) const = default;
};
/// Whether both name the same call, whatever their places.
bool same_call(const CallId& a, const CallId& b);
/// "3.1": the call at place 1 after the third plan was opened.
std::string place_text(std::uint64_t place);

struct FragmentHeader {
  CallId call;
  Stream stream = Stream::rows;
  std::uint32_t index = 0;     ///< of the fragment in its lane
  std::uint32_t num_rows = 0;  ///< or numbers
  std::uint32_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;  ///< CRC32C; travels as 0 unless has_crc
  bool has_crc = false;
  RowPacking packing = RowPacking::plain;
  Grant grant{};  ///< rides along
  bool operator==(const FragmentHeader&) const = default;
};
inline constexpr std::size_t kFragmentHeaderBytes = 72;

/// The sender's options by value: ranks compare all of them and name what differs.
struct SharedOptions {
  std::uint64_t hidden = 0;
  std::uint64_t topology_hash = 0;
  std::uint64_t placement_hash = 0;
  std::uint64_t placement_version = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t num_topk = 0;
  std::uint32_t fragment_bytes = 0;
  std::uint32_t range_tokens = 0;
  std::uint16_t ranges_in_flight = 0;
  DType dtype = DType::f32;
  WireFormat wire_dispatch = WireFormat::f32;
  WireFormat wire_combine = WireFormat::f32;
  WireFormat wire_combine_backward = WireFormat::f32;
  WireFormat wire_dispatch_backward = WireFormat::f32;
  std::uint16_t wire_block_columns = kDefaultBlockColumns;
  float max_relative_error = 0;
  float wire_sparse_ratio = 1;
  Strategy strategy = Strategy::flat;
  bool checksum_payload = true;
  Layout layout = Layout::expert_major;
  WeightMode weights = WeightMode::at_combine;
  bool row_sources = false;
  std::uint16_t row_alignment = 1;
  std::uint32_t extra_bytes = 0;
  bool operator==(const SharedOptions&) const = default;
};

/// "hidden is 1024 on rank 0 and 2048 on rank 3", for the first option that differs.
std::optional<std::string> find_difference(const SharedOptions& a, int rank_a,
                                           const SharedOptions& b, int rank_b);

struct MetadataHeader {
  CallId call;
  std::uint32_t source = 0;
  std::uint16_t failures_digest = 0;  ///< plans that failed, as far as source knows; 0 = none
  std::uint64_t num_tokens = 0;
  SharedOptions options;
  std::uint64_t body_bytes = 0;  ///< the row summary, then the encoded membership
  std::uint32_t body_crc = 0;    ///< CRC32C
  bool operator==(const MetadataHeader&) const = default;
};
inline constexpr std::size_t kMetadataHeaderBytes = 140;

struct GrantMessage {
  std::uint32_t generation = 0;
  Grant grant;
  bool operator==(const GrantMessage&) const = default;
};
inline constexpr std::size_t kGrantMessageBytes = 36;

struct PoisonMessage {
  CallId call;
  ErrorCode code = ErrorCode::peer_failed;
  std::string text;  ///< at most kPoisonTextBytes; longer ones are cut between characters
  bool operator==(const PoisonMessage&) const = default;
};
inline constexpr std::size_t kPoisonTextBytes = 1024;

/// Largest control message.
inline constexpr std::size_t kControlLimitBytes = 64 + kPoisonTextBytes;

void encode(const FragmentHeader& header, std::span<std::byte, kFragmentHeaderBytes> out);
void encode(const MetadataHeader& header, std::span<std::byte, kMetadataHeaderBytes> out);
void encode(const GrantMessage& message, std::span<std::byte, kGrantMessageBytes> out);
std::vector<std::byte> encode(const PoisonMessage& message);

using Bytes = std::span<const std::byte>;

/// Each takes exactly the header (a grant or poison: the whole message). On failure returns the
/// text and leaves `out` as it was. Sizes that a header states of what follows it are the caller's
/// to compare with the message.
[[nodiscard]] std::optional<std::string> decode(Bytes bytes, FragmentHeader& out);
[[nodiscard]] std::optional<std::string> decode(Bytes bytes, MetadataHeader& out);
[[nodiscard]] std::optional<std::string> decode(Bytes bytes, GrantMessage& out);
[[nodiscard]] std::optional<std::string> decode(Bytes bytes, PoisonMessage& out);

using ControlMessage = std::variant<GrantMessage, PoisonMessage>;
/// Whichever of the two its type says.
[[nodiscard]] std::optional<std::string> decode(Bytes bytes, ControlMessage& out);

/// Rows that one rank's routing makes per strategy and target node (flat, rank_dedup, node_dedup),
/// for the choice of a strategy; varints, so that a small batch stays small.
struct RowSummary {
  std::vector<std::array<std::uint64_t, 3>> rows_to_node;
  bool operator==(const RowSummary&) const = default;
};
void encode_row_summary(const RowSummary& summary, std::vector<std::byte>& out);
/// Decodes from the front of `bytes` and shortens it by what was read; on failure returns the text,
/// takes nothing and leaves `out` empty.
[[nodiscard]] std::optional<std::string> decode_row_summary(Bytes& bytes, std::size_t num_nodes,
                                                            RowSummary& out);

}  // namespace ferry::wire
