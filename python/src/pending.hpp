#pragma once
// An operation that was started, whatever its result: keeps the arrays that it works on, and turns
// what it gives into an object of Python.

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ferry/pending.hpp"
#include "group.hpp"

namespace ferry::python {

class AnyPending {
 public:
  virtual ~AnyPending() = default;
  virtual bool progress() = 0;
  virtual bool done() const = 0;
  virtual void cancel(const std::string& reason) = 0;
  /// Waits. Called without the GIL.
  virtual void finish() = 0;
  /// After finish(), once. Requires: the GIL
  virtual py::object take() = 0;
  /// Drops the operation, which may wait: without the GIL. What it holds of Python stays.
  virtual void drop() = 0;
};

template <typename Result>
class StartedPending final : public AnyPending {
 public:
  using Value = std::conditional_t<std::is_void_v<Result>, std::monostate, Result>;
  using Convert = std::function<py::object(Value&&)>;

  StartedPending(Pending<Result> pending, Convert convert)
      : pending_(std::move(pending)), convert_(std::move(convert)) {}
  bool progress() override { return pending_->progress(); }
  bool done() const override { return pending_->done(); }
  void cancel(const std::string& reason) override { pending_->cancel(reason); }
  void finish() override {
    if constexpr (std::is_void_v<Result>) {
      pending_->wait();
      value_.emplace();
    } else {
      value_.emplace(pending_->wait());
    }
  }
  py::object take() override { return convert_(std::move(*value_)); }
  void drop() override {
    pending_.reset();
    value_.reset();
  }
  Pending<Result>& pending() { return *pending_; }

 private:
  std::optional<Pending<Result>> pending_;
  std::optional<Value> value_;
  Convert convert_;
};

/// The part of a pending that goes before the transport.
class PendingResource final : public Resource {
 public:
  PendingResource(std::unique_ptr<AnyPending> started, std::vector<py::object> kept)
      : pending(std::move(started)), keep(std::move(kept)) {}
  void let_go() override {
    // Gone for others at once: they may ask while it waits without the GIL.
    if (auto gone = std::move(pending)) {
      without_gil([&] { gone->drop(); });
      gone.reset();  // with the GIL: it may hold the last reference to an array
    }
    keep.clear();
  }
  bool goes_first() const override { return true; }

  std::unique_ptr<AnyPending> pending;
  std::vector<py::object> keep;  ///< arrays that it reads or writes
};

/// What Python holds.
class PyPending {
 public:
  PyPending(std::shared_ptr<Group> group, std::unique_ptr<PendingResource> resource)
      : group_(std::move(group)), resource_(std::move(resource)) {
    group_->add(resource_.get());
  }
  ~PyPending() { group_->bury(std::move(resource_)); }
  PyPending(const PyPending&) = delete;
  PyPending& operator=(const PyPending&) = delete;

  bool progress();
  bool done() const;
  py::object wait();
  void cancel(const std::string& reason);
  const std::shared_ptr<Group>& group() const { return group_; }
  /// Null once its group has gone, and after wait().
  AnyPending* started() const { return resource_->pending.get(); }

 private:
  std::shared_ptr<Group> group_;
  std::unique_ptr<PendingResource> resource_;
  py::object result_;  ///< once it is there; wait() gives it again
};

template <typename Result>
std::unique_ptr<PyPending> make_pending(const std::shared_ptr<Group>& group,
                                        Pending<Result> started,
                                        typename StartedPending<Result>::Convert convert,
                                        std::vector<py::object> keep) {
  auto pending = std::make_unique<StartedPending<Result>>(std::move(started), std::move(convert));
  return std::make_unique<PyPending>(
      group, std::make_unique<PendingResource>(std::move(pending), std::move(keep)));
}

void bind_pending(py::module_& module);

}  // namespace ferry::python
