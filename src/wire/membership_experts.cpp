// The expert list of a membership in its four encodings: what it takes and how it is written. Where
// no token comes it takes nothing.

#include <algorithm>

#include "wire/bytes.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

std::byte* store_raw(std::byte* at, ExpertLists list, int num_columns) {
  for (std::uint64_t i = 0; i < list.tokens; ++i) *at++ = static_cast<std::byte>(list.count(i) - 1);
  if (raw_column_bytes(num_columns) == 2) {
    return store_block(at, list.columns, list.entries() * sizeof(std::uint16_t));
  }
  for (std::uint64_t e = 0; e < list.entries(); ++e)
    at[e] = static_cast<std::byte>(list.columns[e]);
  return at + list.entries();
}

std::byte* store_bits_of_columns(std::byte* at, std::uint64_t bytes, ExpertLists list,
                                 int num_columns) {
  // Columns of a token are in any order, so that bits are set one by one.
  std::fill_n(at, bytes, std::byte{0});
  std::uint64_t row = 0;
  for (std::uint64_t i = 0; i < list.tokens; ++i, row += static_cast<unsigned>(num_columns)) {
    for (std::uint32_t e = list.entry_begin[i]; e < list.entry_begin[i + 1]; ++e) {
      const std::uint64_t bit = row + list.columns[e];
      at[bit / 8] |= static_cast<std::byte>(1U << (bit % 8));
    }
  }
  return at + bytes;
}

std::byte* store_packed_list(std::byte* at, const ExpertLists& list, int num_columns) {
  const CountForm form = count_form(list.tokens, list.entries(), list.count_bits);
  *at++ = std::byte{form.width};
  if (form.width == CountForm::kEndMarks) {
    at = store_bitmap(at, bytes_of_bits(list.entries()), list.tokens,
                      [&](std::uint64_t i) { return std::uint64_t{list.entry_begin[i + 1]} - 1; });
  } else {
    std::vector<std::uint16_t> counts(list.tokens);
    for (std::uint64_t i = 0; i < list.tokens; ++i) {
      counts[i] = static_cast<std::uint16_t>(list.count(i) - 1);
    }
    at = store_packed(at, counts, form.width);
  }
  return store_packed(at, {list.columns, list.entries()}, column_width(num_columns));
}

std::byte* store_runs(std::byte* at, const ExpertLists& list, int num_columns) {
  std::vector<std::uint32_t> begin{0};
  std::vector<std::uint16_t> columns;
  BitWriter writer(at);
  for_each_equal_run(list, [&](std::uint64_t first, std::uint64_t length) {
    columns.insert(columns.end(), list.columns + list.entry_begin[first],
                   list.columns + list.entry_begin[first + 1]);
    begin.push_back(static_cast<std::uint32_t>(columns.size()));
    writer.put_gamma(length);
  });
  return store_packed_list(writer.end(), ExpertLists(begin, columns), num_columns);
}

}  // namespace

CountForm count_form(std::uint64_t tokens, std::uint64_t entries, std::uint32_t count_bits) {
  const auto width = static_cast<std::uint8_t>(std::bit_width(count_bits));
  return tokens * width <= entries ? CountForm{width} : CountForm{CountForm::kEndMarks};
}

std::uint64_t packed_expert_bytes(std::uint64_t tokens, std::uint64_t entries, CountForm form,
                                  int width) {
  if (tokens == 0) return 0;
  return 1 + bytes_of_bits(form.bits(tokens, entries)) +
         bytes_of_bits(entries * static_cast<unsigned>(width));
}

bool order_is_known(const plan::Membership& membership, const MembershipForm& form) {
  const std::uint16_t* columns = membership.columns.data();
  const float* weights = membership.weights.data();
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    for (std::uint32_t e = membership.entry_begin[i] + 1; e < membership.entry_begin[i + 1]; ++e) {
      const bool equal = !form.weights || weights[e - 1] == weights[e];
      if (equal ? columns[e - 1] > columns[e] : weights[e - 1] < weights[e]) return false;
    }
  }
  return true;
}

std::uint64_t expert_list_bytes(const ExpertLists& lists, int num_columns, ListEncoding encoding) {
  const std::uint64_t entries = lists.entries();
  const auto packed_bytes = [&](std::uint64_t of_tokens, std::uint64_t of_entries) {
    return packed_expert_bytes(of_tokens, of_entries,
                               count_form(of_tokens, of_entries, lists.count_bits),
                               column_width(num_columns));
  };
  switch (encoding) {
    case ListEncoding::raw: return lists.tokens + entries * raw_column_bytes(num_columns);
    case ListEncoding::bitmask:
      return bytes_of_bits(lists.tokens * static_cast<unsigned>(num_columns));
    case ListEncoding::packed: return packed_bytes(lists.tokens, entries);
    case ListEncoding::runs: {
      std::uint64_t run_bits = 0;
      std::uint64_t of_tokens = 0;
      std::uint64_t of_entries = 0;
      for_each_equal_run(lists, [&](std::uint64_t first, std::uint64_t length) {
        run_bits += gamma_bits(length);
        of_entries += lists.count(first);
        ++of_tokens;
      });
      // Counts are the same, only fewer of each.
      return bytes_of_bits(run_bits) + packed_bytes(of_tokens, of_entries);
    }
  }
  return 0;
}

std::byte* store_expert_list(std::byte* at, std::uint64_t bytes, const ExpertLists& lists,
                             int num_columns, ListEncoding encoding) {
  if (lists.tokens == 0) return at;
  switch (encoding) {
    case ListEncoding::raw: return store_raw(at, lists, num_columns);
    case ListEncoding::bitmask: return store_bits_of_columns(at, bytes, lists, num_columns);
    case ListEncoding::packed: return store_packed_list(at, lists, num_columns);
    case ListEncoding::runs: return store_runs(at, lists, num_columns);
  }
  return at;
}

std::uint64_t fewest_expert_bits(ListEncoding encoding, const MembershipForm& form) {
  const std::uint64_t entry_bits = entry_bytes(form) * 8;
  switch (encoding) {
    case ListEncoding::raw: return 8 + 8 * raw_column_bytes(form.num_columns) + entry_bits;
    case ListEncoding::bitmask:
      return static_cast<std::uint64_t>(std::max(form.num_columns, 1)) + entry_bits;
    case ListEncoding::packed:
      return static_cast<std::uint64_t>(column_width(form.num_columns)) + entry_bits;
    case ListEncoding::runs: return entry_bits;
  }
  return 0;
}

}  // namespace ferry::wire
