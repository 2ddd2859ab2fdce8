// sum_rows: weighted sums of rows at random places, in FP32 and in the order of the tree. A row of
// the result is made in chunks of columns, whose sums stay in first-level cache. Terms that go to
// the same level of the tree are added together, in order (sum_streams-inl.hpp).
//
// Invariants:
//   1. A product is rounded before it is added (Mul, then Add; the build turns contraction off).
//   2. A sum starts as a copy of its first term, so -0 and a single term come out as they are.
//   3. A NaN in a result has one fixed pattern (store-inl.hpp).

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sum_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include "kernels/blocks-inl.hpp"
#include "kernels/copy-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/store-inl.hpp"
#include "kernels/sum_streams-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// Columns of one accumulator (8 KiB).
inline constexpr std::size_t kSumChunk = 2048;
static_assert(kSumChunk % kMostBlockColumns == 0);
static_assert(kSumChunk % (kVectors * kMostLanes) == 0);

/// The columns begin..begin+count of a row that are summed now.
struct Columns {
  std::size_t begin = 0;
  std::size_t count = 0;
};

/// One sum of the tree over the current columns; `values` means nothing until it is started.
struct Level {
  float* values = nullptr;  ///< kSumChunk floats, 64-byte aligned
  bool started = false;
};

struct Tree {
  Level rank;
  Level node;
  Level total;
};

/// Where a term goes. A group of one term is that term: it goes straight to the level above.
Level& level_of(const SumTerm& term, Tree& tree) {
  if (tree.rank.started || !term.ends_rank) return tree.rank;
  if (tree.node.started || !term.ends_node) return tree.node;
  return tree.total;
}

/// Hands the finished sum `child` to `parent`; the first one is moved, not added to anything.
void close_level(Level& child, Level& parent, std::size_t count) {
  if (parent.started) {
    const FloatTag df;
    for (std::size_t i = 0; i < count; i += hn::Lanes(df)) {
      hn::Store(hn::Add(hn::Load(df, parent.values + i), hn::Load(df, child.values + i)), df,
                parent.values + i);
    }
  } else {
    std::swap(parent.values, child.values);
  }
  parent.started = true;
  child.started = false;
}

/// Rounds `count` sums once to the dtype of the result; `out` may be `sums` itself.
template <DType kTo>
void round_sums(const float* sums, std::size_t count, Overflow overflow, std::byte* out) {
  const FloatTag df;
  for (std::size_t i = 0; i < count; i += hn::Lanes(df)) {
    FloatVec value = one_nan(hn::Load(df, sums + i));
    if (overflow == Overflow::saturates) value = saturated<kTo>(value);
    store_lanes<kTo>(value, out + i * element_bytes(kTo));
  }
}

/// Buffers of one job.
struct Workspace {
  alignas(64) float sums[3][kSumChunk];
  alignas(64) std::byte rounded[kSumChunk * sizeof(float)];
};

/// The terms from `first` on that go to `level` before anything else happens to the tree.
Bunch next_bunch(const SumJob& job, std::size_t first, std::size_t end, Tree& tree) {
  const SumTerm& head = job.terms[first];
  Level& level = level_of(head, tree);
  level.started = true;
  Bunch bunch{first, 1};
  while (bunch.count < kMostTerms && first + bunch.count < end) {
    const SumTerm& last = job.terms[first + bunch.count - 1];
    if (&level == &tree.rank && last.ends_rank) break;
    if (&level == &tree.node && last.ends_node) break;
    const SumTerm& term = job.terms[first + bunch.count];
    if (&level_of(term, tree) != &level) break;
    if (term.format != head.format) break;
    ++bunch.count;
  }
  return bunch;
}

/// True when the sum at `level` is that of the whole row, because nothing above it has started.
bool is_whole_row(const Level& level, const Tree& tree) {
  if (&level == &tree.rank) return !tree.node.started && !tree.total.started;
  return &level == &tree.total || !tree.total.started;
}

Overflow overflow_of(const SumJob& job) {
  return job.out.crosses ? Overflow::saturates : Overflow::infinite;
}

/// Rounds finished sums and writes them to the columns of the result.
void write_sums(const SumJob& job, const SumRow& row, const Columns& columns, const float* sums,
                Workspace& work) {
  const EncodedColumns source{reinterpret_cast<const std::byte*>(sums), columns.begin,
                              columns.count};
  const BlockRow blocks{row.out, static_cast<std::size_t>(job.hidden), job.out.block_columns};
  const Overflow overflow = overflow_of(job);
  switch (job.out.format) {
    case WireFormat::f32:
      round_sums<DType::f32>(sums, columns.count, overflow, work.rounded);
      break;
    case WireFormat::bf16:
      round_sums<DType::bf16>(sums, columns.count, overflow, work.rounded);
      break;
    case WireFormat::f16:
      round_sums<DType::f16>(sums, columns.count, overflow, work.rounded);
      break;
    case WireFormat::fp8_e4m3fn:
      return encode_columns<DType::f32, WireFormat::fp8_e4m3fn>(source, blocks);
    case WireFormat::int8: return encode_columns<DType::f32, WireFormat::int8>(source, blocks);
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
  const std::size_t size = element_bytes(job.out.format);
  std::byte* const out = row.out + columns.begin * size;
  copy_to_all({work.rounded, columns.count * size, 0}, {&out, 1},
              detail::Lookahead(nullptr, 0, nullptr));
}

void sum_columns(const SumJob& job, const SumRow& row, const Columns& columns, Workspace& work) {
  Tree tree{{work.sums[0]}, {work.sums[1]}, {work.sums[2]}};
  std::byte* out = row.out + columns.begin * element_bytes(job.out.format);
  const std::size_t end = std::size_t{row.first} + row.count;
  for (std::size_t first = row.first; first < end;) {
    const SumTerm& head = job.terms[first];
    Level& level = level_of(head, tree);
    const bool starts = !level.started;
    const Bunch bunch = next_bunch(job, first, end, tree);
    const Streams streams = open_streams(job, bunch, columns.begin);
    const Place place{.sum = level.values,
                      .out = out,
                      .starts = starts,
                      .whole_lines = line_offset(out) == 0,
                      .overflow = overflow_of(job)};
    first += bunch.count;
    if (first == end && is_whole_row(level, tree)) {
      if (const AddFunction finish = choose_finish(head.format, job.out.format)) {
        finish(streams, columns.count, place);
        return;
      }
    }
    choose_add(head.format)(streams, columns.count, place);
    const SumTerm& last = job.terms[first - 1];
    if (last.ends_rank && tree.rank.started) close_level(tree.rank, tree.node, columns.count);
    if (last.ends_node && tree.node.started) close_level(tree.node, tree.total, columns.count);
  }
  write_sums(job, row, columns, tree.total.values, work);
}

void sum_all(const SumJob& job) {
  Workspace work;
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  for (const SumRow& row : job.rows) {
    if (row.count == 0) {
      std::memset(row.out, 0, job.out.row_bytes(job.hidden));
      continue;
    }
    for (std::size_t begin = 0; begin < hidden; begin += kSumChunk) {
      sum_columns(job, row, {begin, std::min(kSumChunk, hidden - begin)}, work);
    }
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/check.hpp"
#include "kernels/check_blocks.hpp"
#include "kernels/float_state.hpp"

namespace ferry::kernels {

HWY_EXPORT(sum_all);

void sum_rows(const SumJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "sum_rows: hidden = {}; allowed: 1 or more", job.hidden);
  detail::check_blocks("sum_rows", job.out);
  if (job.block_columns != 0) detail::check_blocks("sum_rows", job.block_columns);
  for (const SumRow& row : job.rows) {
    if (row.count == 0) continue;
    const std::size_t end = std::size_t{row.first} + row.count;
    FERRY_ASSERT(end <= job.terms.size(), "sum_rows: terms {}..{} of {}", row.first, end,
                 job.terms.size());
    FERRY_ASSERT(job.terms[end - 1].ends_rank && job.terms[end - 1].ends_node,
                 "sum_rows: term {} ends a row and must carry ends_rank and ends_node", end - 1);
  }
  FERRY_ASSERT_SLOW(
      job.block_columns != 0 ||
          std::ranges::none_of(job.terms, [](const SumTerm& t) { return is_quantised(t.format); }),
      "sum_rows: quantised terms, and block_columns = 0");
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(sum_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
