// The decoder of expert lists. Every size follows from what was checked before it, and every column
// and count is checked before it is used.

#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "plan/memory.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// Reads one expert list; a step returns the text of an error, or nothing.
class ExpertDecoder {
 public:
  ExpertDecoder(Bytes& rest, const MembershipLimits& limits, plan::Membership& out)
      : rest_(rest),
        limits_(limits),
        num_columns_(static_cast<std::uint32_t>(std::max(limits.form.num_columns, 0))),
        max_count_(static_cast<std::uint32_t>(std::clamp(limits.num_topk, 0, int{kMaxCount}))),
        out_(out) {}

  std::optional<std::string> take_raw();
  std::optional<std::string> take_bitmask();
  std::optional<std::string> take_packed();
  std::optional<std::string> take_runs();

 private:
  /// Where a list is put, and the token that its i-th list belongs to.
  struct Target {
    std::vector<std::uint32_t>& entry_begin;
    std::vector<std::uint16_t>& columns;
  };
  std::uint32_t token_of(std::uint64_t list) const {
    return out_.tokens[first_of_.empty() ? list : first_of_[list]];
  }
  std::optional<std::string> check_bytes(std::uint64_t bytes, const char* of) const {
    if (bytes <= rest_.size()) return std::nullopt;
    return fmt::format("membership: {} bytes are left; expected at least {} for {}", rest_.size(),
                       bytes, of);
  }
  bool is_count(std::uint64_t count) const { return count != 0 && count <= max_count_; }
  std::string wrong_count(std::uint64_t list, std::uint64_t count) const {
    return fmt::format("membership: token {} has {} entries; expected 1..num_topk = {}",
                       token_of(list), count, max_count_);
  }
  static std::optional<std::string> check_number(std::uint64_t entries) {
    if (entries <= std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
    return fmt::format("membership: {} entries; expected fewer than 2^32", entries);
  }
  /// What is left behind a list of `list_bytes` bytes must be what its entries need.
  std::optional<std::string> check_entries(std::uint64_t entries, std::uint64_t list_bytes) const {
    if (auto error = check_number(entries)) return error;
    const std::uint64_t needed = list_bytes + entries * entry_bytes(limits_.form);
    if (needed == rest_.size()) return std::nullopt;
    return fmt::format("membership: {} bytes are left for {} entries; expected exactly {}",
                       rest_.size(), entries, needed);
  }
  std::optional<std::string> take_packed_list(std::uint64_t lists, bool whole, Target target);
  std::optional<std::string> take_end_marks(std::uint64_t lists, Target target);
  std::optional<std::string> take_widths(std::uint64_t lists, int width, Target target);
  std::optional<std::string> check_columns(const Target& target) const;

  Bytes& rest_;
  const MembershipLimits& limits_;
  const std::uint32_t num_columns_;
  const std::uint32_t max_count_;
  plan::Membership& out_;
  std::vector<std::uint32_t> first_of_;  ///< of runs: their first token's place in the list
};

std::optional<std::string> ExpertDecoder::take_raw() {
  const std::uint64_t tokens = out_.tokens.size();
  if (auto error = check_bytes(tokens, "counts")) return error;
  std::uint64_t entries = 0;
  plan::resize_for_overwrite(out_.entry_begin, tokens + 1);
  out_.entry_begin[0] = 0;
  for (std::uint64_t i = 0; i < tokens; ++i) {
    const std::uint64_t count = 1 + std::to_integer<std::uint64_t>(rest_[i]);
    if (!is_count(count)) return wrong_count(i, count);
    entries += count;
    out_.entry_begin[i + 1] = static_cast<std::uint32_t>(entries);
  }
  const std::uint64_t column_bytes = raw_column_bytes(limits_.form.num_columns);
  if (auto error = check_entries(entries, tokens + entries * column_bytes)) return error;
  plan::resize_for_overwrite(out_.columns, entries);
  const std::byte* from = rest_.data() + tokens;
  if (column_bytes == 2 && entries != 0) {
    std::memcpy(out_.columns.data(), from, entries * column_bytes);
  } else {
    for (std::uint64_t e = 0; e < entries; ++e) {
      out_.columns[e] = std::to_integer<std::uint16_t>(from[e]);
    }
  }
  rest_ = rest_.subspan(tokens + entries * column_bytes);
  return check_columns({out_.entry_begin, out_.columns});
}

std::optional<std::string> ExpertDecoder::take_bitmask() {
  const std::uint64_t tokens = out_.tokens.size();
  const std::uint64_t bits = tokens * num_columns_;
  if (auto error = check_bytes(bytes_of_bits(bits), "bitmasks of columns")) return error;
  const Bytes rows = rest_.first(bytes_of_bits(bits));
  if (!ends_in_zeros(rows, bits)) {
    return std::string("membership: the bits after the bitmasks of columns are not 0");
  }
  const std::uint64_t entries = count_set_bits(rows);
  if (auto error = check_entries(entries, rows.size())) return error;
  plan::resize_for_overwrite(out_.entry_begin, tokens + 1);
  plan::resize_for_overwrite(out_.columns, entries);
  out_.entry_begin[0] = 0;
  std::uint32_t at = 0;
  for (std::uint64_t i = 0; i < tokens; ++i) {
    const std::uint32_t before = at;
    for (std::uint32_t column = 0; column < num_columns_; column += 32) {
      const int width = static_cast<int>(std::min(num_columns_ - column, 32U));
      for (std::uint64_t word = load_bits(rows, i * num_columns_ + column, width); word != 0;
           word &= word - 1) {
        out_.columns[at++] =
            static_cast<std::uint16_t>(column + static_cast<unsigned>(std::countr_zero(word)));
      }
    }
    if (!is_count(at - before)) return wrong_count(i, at - before);
    out_.entry_begin[i + 1] = at;
  }
  rest_ = rest_.subspan(rows.size());
  return std::nullopt;
}

std::optional<std::string> ExpertDecoder::take_packed() {
  return take_packed_list(out_.tokens.size(), true, {out_.entry_begin, out_.columns});
}

/// Of a whole list nothing but what its entries need may be left behind it.
std::optional<std::string> ExpertDecoder::take_packed_list(std::uint64_t lists, bool whole,
                                                           Target target) {
  if (auto error = check_bytes(1, "the form of counts")) return error;
  const CountForm form{std::to_integer<std::uint8_t>(rest_[0])};
  rest_ = rest_.subspan(1);
  if (form.width != CountForm::kEndMarks && form.width > 8) {
    return fmt::format("membership: counts take {} bits; expected at most 8, or {} for end marks",
                       form.width, CountForm::kEndMarks);
  }
  auto error = form.width == CountForm::kEndMarks ? take_end_marks(lists, target)
                                                  : take_widths(lists, form.width, target);
  if (error) return error;
  const std::uint64_t entries = target.entry_begin.back();
  const CountForm expected =
      count_form(lists, entries, ExpertLists(target.entry_begin, target.columns).count_bits);
  if (form != expected) {
    return fmt::format("membership: counts have the form {}; expected {}, the smallest", form.width,
                       expected.width);
  }
  const int width = column_width(limits_.form.num_columns);
  const std::uint64_t bits = entries * static_cast<unsigned>(width);
  const std::uint64_t bytes = bytes_of_bits(bits);
  if (whole) {
    if ((error = check_entries(entries, bytes))) return error;
  } else if ((error = check_bytes(bytes, "columns"))) {
    return error;
  }
  const Bytes packed = rest_.first(bytes);
  if (!ends_in_zeros(packed, bits)) {
    return std::string("membership: the bits after the packed columns are not 0");
  }
  plan::resize_for_overwrite(target.columns, entries);
  load_packed(packed, width, target.columns);
  rest_ = rest_.subspan(bytes);
  return check_columns(target);
}

std::optional<std::string> ExpertDecoder::take_end_marks(std::uint64_t lists, Target target) {
  plan::resize_for_overwrite(target.entry_begin, lists + 1);
  target.entry_begin[0] = 0;
  // The word of the last mark first: in those before it all marks count.
  std::uint64_t whole_words = 0;
  std::uint64_t left = lists;
  for (; whole_words < rest_.size(); whole_words += 8) {
    const auto marks = static_cast<unsigned>(std::popcount(load_word(rest_, whole_words)));
    if (marks >= left) break;
    left -= marks;
  }
  if (whole_words >= rest_.size()) {
    return fmt::format("membership: the end marks of {} tokens are missing; expected {} of them",
                       left, lists);
  }
  std::uint32_t* end = target.entry_begin.data();
  const auto add = [&end](std::uint64_t mark) { *++end = static_cast<std::uint32_t>(mark + 1); };
  for_each_set_bit(rest_.first(whole_words), add);
  std::uint64_t entries = 0;
  for (std::uint64_t word = load_word(rest_, whole_words); left > 0; --left, word &= word - 1) {
    entries = whole_words * 8 + static_cast<unsigned>(std::countr_zero(word)) + 1;
    add(entries - 1);
  }
  if (!ends_in_zeros(rest_, entries)) {
    return std::string("membership: the bits after the last end mark are not 0");
  }
  if (auto error = check_number(entries)) return error;
  for (std::uint64_t i = 0; i < lists; ++i) {
    const std::uint32_t count = target.entry_begin[i + 1] - target.entry_begin[i];
    if (!is_count(count)) return wrong_count(i, count);
  }
  rest_ = rest_.subspan(bytes_of_bits(entries));
  return std::nullopt;
}

std::optional<std::string> ExpertDecoder::take_widths(std::uint64_t lists, int width,
                                                      Target target) {
  const std::uint64_t bits = lists * static_cast<unsigned>(width);
  if (auto error = check_bytes(bytes_of_bits(bits), "counts")) return error;
  const Bytes counts = rest_.first(bytes_of_bits(bits));
  if (!ends_in_zeros(counts, bits)) {
    return std::string("membership: the bits after the last count are not 0");
  }
  plan::resize_for_overwrite(target.entry_begin, lists + 1);
  target.entry_begin[0] = 0;
  std::vector<std::uint16_t> fewer(lists);  // by one than there are entries
  load_packed(counts, width, fewer);
  std::uint64_t entries = 0;
  for (std::uint64_t i = 0; i < lists; ++i) {
    if (fewer[i] >= max_count_) return wrong_count(i, fewer[i] + 1U);
    entries += fewer[i] + 1U;
    target.entry_begin[i + 1] = static_cast<std::uint32_t>(entries);
  }
  if (auto error = check_number(entries)) return error;
  rest_ = rest_.subspan(counts.size());
  return std::nullopt;
}

std::optional<std::string> ExpertDecoder::take_runs() {
  const std::uint64_t tokens = out_.tokens.size();
  BitReader reader(rest_);
  std::vector<std::uint64_t> lengths;
  for (std::uint64_t next = 0, length = 0; next < tokens; next += length) {
    if (!reader.take_gamma(length) || length > tokens - next) {
      return fmt::format(
          "membership: the run of equal experts from tokens[{}] on is cut off or too long; "
          "expected at most {} tokens",
          next, tokens - next);
    }
    first_of_.push_back(static_cast<std::uint32_t>(next));
    lengths.push_back(length);
  }
  if (!reader.rest_of_byte_is_zero()) {
    return std::string("membership: the bits after the runs of equal experts are not 0");
  }
  rest_ = rest_.subspan(reader.bytes_taken());
  std::vector<std::uint32_t> entry_begin;
  std::vector<std::uint16_t> columns;
  if (auto error = take_packed_list(lengths.size(), false, {entry_begin, columns})) return error;
  const ExpertLists lists(entry_begin, columns);
  std::uint64_t entries = 0;
  for (std::uint64_t i = 0; i < lists.tokens; ++i) {
    entries += lists.count(i) * lengths[i];
    if (i > 0 && equals_last(lists, i)) {
      return fmt::format("membership: token {} begins a run with the experts of the one before",
                         token_of(i));
    }
  }
  if (auto error = check_entries(entries, 0)) return error;
  plan::resize_for_overwrite(out_.entry_begin, tokens + 1);
  plan::resize_for_overwrite(out_.columns, entries);
  out_.entry_begin[0] = 0;
  std::uint64_t token = 0;
  std::uint16_t* to = out_.columns.data();
  for (std::uint64_t i = 0; i < lists.tokens; ++i) {
    for (std::uint64_t of_run = 0; of_run < lengths[i]; ++of_run, ++token) {
      to = std::copy_n(lists.columns + lists.entry_begin[i], lists.count(i), to);
      out_.entry_begin[token + 1] = out_.entry_begin[token] + lists.count(i);
    }
  }
  return std::nullopt;
}

std::optional<std::string> ExpertDecoder::check_columns(const Target& target) const {
  // last_user[c] = 1 + place of the last list that named column c.
  std::vector<std::uint32_t> last_user(target.columns.empty() ? 0 : num_columns_);
  std::uint32_t* const last = last_user.data();
  const std::uint16_t* const columns = target.columns.data();
  const auto lists = static_cast<std::uint32_t>(target.entry_begin.size() - 1);
  std::uint32_t e = 0;
  for (std::uint32_t i = 0; i < lists; ++i) {
    for (const std::uint32_t end = target.entry_begin[i + 1]; e < end; ++e) {
      const std::uint32_t column = columns[e];
      if (column >= num_columns_) {
        return fmt::format("membership: token {} names column {}; expected below num_columns = {}",
                           token_of(i), column, num_columns_);
      }
      if (last[column] == i + 1) {
        return fmt::format("membership: token {} names column {} twice; expected once", token_of(i),
                           column);
      }
      last[column] = i + 1;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> take_expert_list(Bytes& rest, ListEncoding encoding,
                                            const MembershipLimits& limits, plan::Membership& out) {
  ExpertDecoder decoder(rest, limits, out);
  if (out.tokens.empty()) {
    out.entry_begin.assign(1, 0);
    out.columns.clear();
    if (rest.empty()) return std::nullopt;
    return fmt::format("membership: {} bytes are left for 0 entries; expected exactly 0",
                       rest.size());
  }
  return take_list(decoder, encoding);
}

}  // namespace ferry::wire
