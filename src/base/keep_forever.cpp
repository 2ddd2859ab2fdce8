#include "base/keep_forever.hpp"

#include <mutex>
#include <vector>

namespace ferry::base {

void keep_forever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace ferry::base
