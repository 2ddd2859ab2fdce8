#pragma once
// Why a job ended, told once: the first text wins and never changes.

#include <atomic>
#include <optional>
#include <string>

namespace ferry::detail {

class AbortText {
 public:
  /// True when this call's text is the one that counts.
  bool set(const std::string& text) {
    if (claimed_.exchange(true)) {
      return false;
    }
    text_ = text;
    told_.store(true);
    return true;
  }

  bool is_set() const { return told_.load(std::memory_order_acquire); }

  std::optional<std::string> get() const {
    return is_set() ? std::optional<std::string>(text_) : std::nullopt;
  }

 private:
  std::atomic<bool> claimed_{false};
  std::atomic<bool> told_{false};
  std::string text_;  // written once, before told_
};

}  // namespace ferry::detail
