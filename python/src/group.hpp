#pragma once
// A rank's place in a group, as Python holds it. Python drops objects late, in any order and on any
// thread; Ferry wants exchanges and pendings dropped before their transport, and not by a second
// thread. So what may not outlive the transport is a Resource, known to its group.
//
// Invariants:
//   1. close() lets go of all resources, then of the transport. Calls after that are refused.
//   2. A resource that Python drops on another thread than the last caller's, or while a call
//      runs, is kept and let go by the next call.
//   3. Nobody waits for the GIL while holding a lock of a group or of Ferry's, but the check for
//      signals inside a wait, and every call into Ferry that may take such a lock gives the GIL
//      away.

#include <pybind11/pybind11.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/progress_thread.hpp"
#include "ferry/transport.hpp"

namespace ferry::python {

namespace py = pybind11;

/// Runs a call of Ferry that may wait, compute or take a lock.
template <typename Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

class Resource {
 public:
  virtual ~Resource() = default;
  /// Drops what may not outlive the transport. Called with the GIL, at most once a time.
  virtual void let_go() = 0;
  /// Pendings go before exchanges.
  virtual bool goes_first() const = 0;
};

struct GroupOptions {
  TransportLimits limits;
  bool progress_thread = false;
  /// Waits look for signals: only the main thread of Python gets them.
  bool checks_signals = false;
};

class Group {
 public:
  Group(std::unique_ptr<Transport> transport, const GroupOptions& options);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

  int rank() const { return rank_; }
  const Topology& topology() const { return topology_; }
  const std::string& name() const { return name_; }

  /// Held during a call. Requires: the GIL
  /// Errors: invalid_argument after close()
  class Use {
   public:
    explicit Use(Group& group);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Transport& transport() const { return *group_.transport_; }

   private:
    Group& group_;
  };

  void add(Resource* resource);
  /// Takes what Python has dropped. Requires: the GIL
  void bury(std::unique_ptr<Resource> resource);
  /// Ends the group on this rank, with its sub-groups; with a text it fails on every rank.
  /// Errors: invalid_argument inside another call of the same thread
  void close(const std::optional<std::string>& failure);
  bool closed() const;
  /// Every wait on every rank ends with peer_failed and this text. Any thread.
  void abort(const std::string& text);
  std::shared_ptr<Group> subgroup(const std::vector<int>& ranks);
  void set_limits(const TransportLimits& limits);
  const TransportLimits& limits() const { return options_.limits; }

 private:
  void drain();
  void let_go_of_all();

  const int rank_;
  const Topology topology_;
  const std::string name_;
  GroupOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable left_;
  std::unique_ptr<Transport> transport_;
  std::optional<ProgressThread> progress_;
  bool closing_ = false;
  int num_inside_ = 0;
  std::thread::id caller_;
  std::vector<Resource*> resources_;
  std::vector<std::unique_ptr<Resource>> buried_;
  std::vector<std::weak_ptr<Group>> subgroups_;
};

void bind_group(py::module_& module);

}  // namespace ferry::python
