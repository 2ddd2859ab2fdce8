#pragma once
// What the public API throws. A message says what, where, which value, what is allowed and the fix;
// the same refusal carries the same text on every rank.

#include <stdexcept>
#include <string>
#include <string_view>

namespace ferry {

enum class ErrorCode {
  invalid_argument,    ///< a value is out of range or has the wrong shape or dtype; fix the call
  mismatch,            ///< ranks disagree on an option or on the order of calls; make them agree
  stale_plan,          ///< the plan is of another exchange or placement, or poisoned; plan again
  limit_exceeded,      ///< a stated limit (pool, metadata) is too small; raise it, or free handles
  resource_exhausted,  ///< the system gave no memory or handle; free some, or ask for less
  wrong_thread,        ///< a second thread used a transport that is in use; one caller at a time
  timeout,             ///< a peer gave no sign of life before the deadline; see the named rank
  peer_failed,         ///< another rank failed or was ended; the text is that rank's own
  corrupt_message,     ///< a message failed its checks; suspect the network or mixed versions
  cancelled,           ///< the caller gave up on an unfinished operation
  unsupported,         ///< this build or transport cannot do it; the text says what can
};

/// Name of a code as it appears in messages, for example "invalid_argument".
std::string_view to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace ferry
