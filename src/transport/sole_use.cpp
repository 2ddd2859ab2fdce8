// Who works on a transport: see sole_use.hpp.

#include "transport/sole_use.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace ferry::detail {

// A page that the system clears in a forked child, so that asking is no system call. Where it
// cannot, the process number tells.
SoleUse::SoleUse() : woken_(std::make_unique<std::condition_variable_any>()), process_(::getpid()) {
  void* const page = ::mmap(nullptr, static_cast<std::size_t>(::getpagesize()),
                            PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  marker_ = static_cast<unsigned char*>(page);
  if (::madvise(page, static_cast<std::size_t>(::getpagesize()), MADV_WIPEONFORK) == 0) {
    *marker_ = 1;
  } else {
    unmap_marker();
  }
}

SoleUse::~SoleUse() {
  // The parent's progress thread may wait in it for ever.
  if (is_forked()) static_cast<void>(woken_.release());
  unmap_marker();
}

void SoleUse::unmap_marker() {
  if (marker_ == nullptr) return;
  ::munmap(marker_, static_cast<std::size_t>(::getpagesize()));
  marker_ = nullptr;
}

bool SoleUse::is_forked() const {
  return marker_ != nullptr ? *marker_ == 0 : ::getpid() != process_;
}

void SoleUse::lock() {
  if (is_forked()) return;
  waiting_.fetch_add(1, std::memory_order_relaxed);
  mutex_.lock();
  waiting_.fetch_sub(1, std::memory_order_relaxed);
}

void SoleUse::unlock() {
  if (!is_forked()) mutex_.unlock();
}

bool SoleUse::take_progress() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(has_progress_, true);
}

void SoleUse::give_progress_back() {
  const std::lock_guard lock(mutex_);
  has_progress_ = false;
}

void SoleUse::work_came() {
  has_work_ = true;
  if (has_progress_) woken_->notify_all();
}

void SoleUse::wait_for_work(const std::atomic<bool>& stop) {
  woken_->wait(mutex_, [&] { return has_work_ || stop.load(std::memory_order_relaxed); });
}

void SoleUse::wake() {
  const std::lock_guard lock(mutex_);
  woken_->notify_all();
}

}  // namespace ferry::detail
