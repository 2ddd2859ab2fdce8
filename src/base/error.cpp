#include "ferry/error.hpp"

namespace ferry {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::mismatch: return "mismatch";
    case ErrorCode::stale_plan: return "stale_plan";
    case ErrorCode::limit_exceeded: return "limit_exceeded";
    case ErrorCode::resource_exhausted: return "resource_exhausted";
    case ErrorCode::wrong_thread: return "wrong_thread";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::peer_failed: return "peer_failed";
    case ErrorCode::corrupt_message: return "corrupt_message";
    case ErrorCode::cancelled: return "cancelled";
    case ErrorCode::unsupported: return "unsupported";
  }
  return "unknown";
}

}  // namespace ferry
