#include "model/row_batch.h"

#include <algorithm>

namespace kdt {

namespace {

// Each list begins at a multiple of so many numbers.
constexpr int64_t kAlignment = 16;

int64_t room(int64_t count) { return (count + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

RowBatch::RowBatch(Backend& backend, int64_t max_rows, int64_t max_sequences, int64_t max_blocks)
    : backend_(backend),
      max_rows_(max_rows),
      max_sequences_(max_sequences),
      max_blocks_(max_blocks) {
  device_ =
      backend.allocate(DType::kInt32, {4 * room(max_rows) + room(max_sequences + 1) +
                                       room(max_sequences) + room(max_sequences * max_blocks)});
  clear();
}

void RowBatch::clear() {
  for (auto* list :
       {&token_ids_, &positions_, &parents_, &prefix_len_, &block_table_, &chosen_rows_})
    list->clear();
  row_begin_.assign(1, 0);
}

void RowBatch::begin_sequence(int64_t prefix_len, const std::vector<int32_t>& block_table) {
  KDT_CHECK(static_cast<int64_t>(prefix_len_.size()) < max_sequences_, "batch: more than ",
            max_sequences_, " sequences");
  KDT_CHECK(static_cast<int64_t>(block_table.size()) <= max_blocks_, "batch: ", block_table.size(),
            " blocks, at most ", max_blocks_);
  prefix_len_.push_back(static_cast<int32_t>(prefix_len));
  row_begin_.push_back(row_begin_.back());
  block_table_.insert(block_table_.end(), block_table.begin(), block_table.end());
  // Blocks past the sequence's own are never read; -1 would be refused if one were.
  block_table_.resize(prefix_len_.size() * max_blocks_, -1);
}

void RowBatch::add_row(int32_t token_id, int64_t position, int32_t parent) {
  KDT_CHECK(num_rows() < max_rows_, "batch: more than ", max_rows_, " rows");
  token_ids_.push_back(token_id);
  positions_.push_back(static_cast<int32_t>(position));
  parents_.push_back(parent);
  ++row_begin_.back();
}

void RowBatch::add_chain(const int32_t* token_ids, int64_t count, int64_t position) {
  const int32_t first = row_begin_.back() - row_begin_[row_begin_.size() - 2];
  for (int64_t i = 0; i < count; ++i) {
    add_row(token_ids[i], position + i, first + static_cast<int32_t>(i) - 1);
  }
}

void RowBatch::choose_row(int64_t row) {
  KDT_CHECK(static_cast<int64_t>(chosen_rows_.size()) < max_rows_, "batch: more than ", max_rows_,
            " chosen rows");
  chosen_rows_.push_back(static_cast<int32_t>(row));
}

void RowBatch::upload() {
  std::vector<int32_t> all;  // one copy costs less than many
  const auto place = [&](const std::vector<int32_t>& list) {
    const auto begin = static_cast<int64_t>(all.size()), count = static_cast<int64_t>(list.size());
    all.insert(all.end(), list.begin(), list.end());
    all.resize(begin + room(count));
    return device_.tensor.rows(begin, count);
  };
  device_ids_ = place(token_ids_);
  device_positions_ = place(positions_);
  device_chosen_rows_ = place(chosen_rows_);
  device_rows_ = {.row_begin = place(row_begin_),
                  .prefix_len = place(prefix_len_),
                  .block_table = place(block_table_).view({num_sequences(), max_blocks_}),
                  .parents = place(parents_)};
  backend_.upload(device_.tensor.rows(0, static_cast<int64_t>(all.size())), all.data());
}

}  // namespace kdt
