// The order of RankBench::run_once without bytes: MPI sends what it sends.
#include "bench/baseline_bench.hpp"

#include <cstring>

#include <fmt/format.h>

#include "bench/clock.hpp"
#include "bench/memory.hpp"
#include "common/failures.hpp"
#include "support/rows.hpp"
#include "support/verify.hpp"

namespace ferry::bench {
namespace {

void poison(Matrix matrix) {
  if (matrix.rows == 0) return;
  std::memset(matrix.data, kPoison, static_cast<std::size_t>(matrix.rows * matrix.stride_bytes()));
}

}  // namespace

std::string name_of_repeat(int repeat) {
  return repeat < 0 ? std::string("warm-up") : fmt::format("repeat {}", repeat + 1);
}

BaselineBench::BaselineBench(BaselineRows which, const Setting& setting)
    : which_(which),
      setting_(setting),
      baseline_(make_baseline(which, setting.job, setting.workload)) {}

void BaselineBench::fail(int repeat, const std::string& text) const {
  throw tools::VerificationError(std::nullopt,
                                 fmt::format("verification failed: {}, {}: {}", to_string(which_),
                                             name_of_repeat(repeat), text));
}

void BaselineBench::run_experts() {
  for (std::size_t i = 0; i < baseline_->local_experts().size(); ++i) {
    for (std::int64_t row = baseline_->expert_offsets()[i];
         row < baseline_->expert_offsets()[i + 1]; ++row) {
      support::apply_expert(baseline_->local_experts()[i], baseline_->rows(), baseline_->outputs(),
                            row);
    }
  }
}

void BaselineBench::run_once(int repeat, std::uint64_t seed) {
  const Workload& workload = setting_.workload;
  const int rank = setting_.job.rank();
  const Matrix out = setting_.tokens.out;
  const support::Model model = support::hashed_model(seed, workload.shape.dtype);
  support::fill_rows(seed, rank, setting_.tokens.x);
  poison(out);
  baseline_->poison(kPoison);

  // As in RankBench each timed call follows the same one untimed.
  BaselineTimes times;
  baseline_->exchange_counts();
  setting_.stage.line_up();
  times.counts.start_s = now_s();
  baseline_->exchange_counts();
  times.counts.end_s = now_s();

  baseline_->dispatch(out);
  setting_.stage.line_up();
  times.dispatch.start_s = now_s();
  baseline_->dispatch(setting_.tokens.x);
  times.dispatch.end_s = now_s();
  setting_.stage.drain();
  run_experts();

  baseline_->combine(out);
  poison(out);
  setting_.stage.line_up();
  times.combine.start_s = now_s();
  baseline_->combine(out);
  times.combine.end_s = now_s();
  setting_.stage.drain();
  const Matrix rows = baseline_->rows();
  if (setting_.options.fault == Fault::baseline && repeat == 0 && rows.rows > 0) {
    rows.row(0)[0] ^= std::byte{1};
  }
  const support::Reference row_oracle(oracle_of_rows(workload), model,
                                      support::views(workload.routing));
  if (const auto fault = support::check_rows(row_oracle, rank, rows)) fail(repeat, *fault);
  const support::Reference sum_oracle(oracle_of_sums(which_, workload), model,
                                      support::views(workload.routing));
  if (const auto fault = support::check_out(sum_oracle, rank, out)) fail(repeat, *fault);

  record_.buffer_bytes = baseline_->buffer_bytes();
  if (repeat >= 0) record_.repeats.push_back(times);
}

}  // namespace ferry::bench
