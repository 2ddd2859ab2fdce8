// Running of scripts on threads (with and without a link rate), on the stepped world, and under a
// launcher, in place of threads, on the processes of its MPI job.

#include "transport/harness.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "base/hash.hpp"
#include "ferry/error.hpp"
#include "ferry/threads.hpp"
#include "support/mpi_program.hpp"
#include "transport/stepped.hpp"

namespace ferry::testing {

namespace {

constexpr double kGiveUp_s = 120;
constexpr int kMostRounds = 2'000'000;
constexpr double kPacedBits_per_s = 4e9;

class ScriptWaiter final : public Waiter {
 public:
  explicit ScriptWaiter(Script& script) : script_(script) {}
  Progress poll() override {
    const std::size_t before = script_.steps_done();
    if (script_.poll()) return Progress::done;
    return script_.steps_done() == before ? Progress::idle : Progress::advanced;
  }
  std::uint64_t life_sign() override { return 0; }
  double quiet_limit_s() const override { return kGiveUp_s; }
  double stuck_limit_s() const override { return kGiveUp_s; }

 private:
  Script& script_;
};

void run_stepped(const Setting& setting, const Program& program) {
  const int num_ranks = setting.topology.num_ranks();
  stepped::World world({.topology = setting.topology, .seed = setting.seed});
  std::vector<Script> scripts(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    program(world.transport(rank), scripts[rank]);
  }
  int running = num_ranks;
  std::vector<bool> ended(num_ranks, false);
  for (int round = 0; running > 0; ++round) {
    if (round == kMostRounds) throw std::runtime_error("the scripts do not end");
    const auto rank = world.draw(num_ranks);
    if (!ended[rank] && scripts[rank].poll()) {
      ended[rank] = true;
      --running;
    }
    world.step();
  }
}

void run_processes(const Setting& setting, const Program& program) {
  std::vector<std::optional<support::Failure>> failures(setting.topology.num_ranks());
  support::MpiProgram(setting.topology)
      .run(
          [&](Transport& transport, support::Meeting&) {
            Script script;
            program(transport, script);
            wait_for(transport, script);
          },
          failures);
  for (const auto& failure : failures) {
    if (!failure) continue;
    if (failure->code) throw Error(*failure->code, failure->text);
    throw std::runtime_error(failure->text);
  }
}

}  // namespace

std::string to_string(Kind kind) {
  switch (kind) {
    case Kind::threads: return "threads";
    case Kind::paced: return "paced";
    case Kind::stepped: return "stepped";
  }
  return "unknown";
}

bool Script::poll() {
  while (next_ < steps_.size() && steps_[next_]()) ++next_;
  return next_ == steps_.size();
}

void wait_for(Transport& transport, Script& script) {
  ScriptWaiter waiter(script);
  if (transport.wait_until(waiter) != WaitOutcome::done) {
    throw std::runtime_error("step " + std::to_string(script.steps_done()) + " of rank " +
                             std::to_string(transport.rank()) + " does not end");
  }
}

void run_program(const Setting& setting, const Program& program) {
  if (setting.kind == Kind::stepped) {
    run_stepped(setting, program);
    return;
  }
  if (setting.kind == Kind::threads && support::MpiProgram::is_on()) {
    run_processes(setting, program);
    return;
  }
  threads::Options options;
  options.topology = setting.topology;
  options.link_bits_per_s = setting.kind == Kind::paced ? kPacedBits_per_s : 0;
  threads::run(options, [&](Transport& transport) {
    Script script;
    program(transport, script);
    wait_for(transport, script);
  });
}

std::vector<std::byte> pattern(std::uint64_t seed, std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    made[i] = static_cast<std::byte>(base::mix64(seed + i / 8) >> (i % 8 * 8));
  }
  return made;
}

bool is_pattern(std::span<const std::byte> got, std::uint64_t seed) {
  const std::vector<std::byte> expected = pattern(seed, got.size());
  return std::equal(got.begin(), got.end(), expected.begin());
}

}  // namespace ferry::testing
