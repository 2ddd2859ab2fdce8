#pragma once
// Runs one program on every kind of transport: ranks are written as scripts of steps that are asked
// until they say true, so that a blocking and a stepped transport run the same test.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ferry/transport.hpp"

namespace ferry::testing {

enum class Kind { threads, paced, stepped };
std::string to_string(Kind kind);

/// What one rank does, in order. A step that returns false is asked again.
class Script {
 public:
  using Step = std::function<bool()>;

  void then(Step step) { steps_.push_back(std::move(step)); }
  void once(std::function<void()> action) {
    then([action = std::move(action)] {
      action();
      return true;
    });
  }
  /// One poll. True once every step is done.
  bool poll();
  std::size_t steps_done() const { return next_; }

 private:
  std::vector<Step> steps_;
  std::size_t next_ = 0;
};

struct Setting {
  Kind kind = Kind::threads;
  Topology topology = Topology::single_node(1);
  std::uint64_t seed = 1;
};

using Program = std::function<void(Transport&, Script&)>;

/// Runs `program` on every rank until all scripts end.
/// Errors: std::runtime_error when they do not end; whatever a step throws.
void run_program(const Setting& setting, const Program& program);

/// Drives a script through Transport::wait_until. Errors: std::runtime_error when it does not end.
void wait_for(Transport& transport, Script& script);

/// Bytes that tell who sent which message to whom.
std::vector<std::byte> pattern(std::uint64_t seed, std::size_t bytes);
bool is_pattern(std::span<const std::byte> got, std::uint64_t seed);

}  // namespace ferry::testing
