#include "model/row_batch.h"

#include <algorithm>

namespace kdt {

RowBatch::RowBatch(Backend& backend, int64_t max_rows, int64_t max_sequences, int64_t max_blocks)
    : backend_(backend),
      max_rows_(max_rows),
      max_sequences_(max_sequences),
      max_blocks_(max_blocks) {
  device_ids_ = backend.allocate(DType::kInt32, {max_rows});
  device_positions_ = backend.allocate(DType::kInt32, {max_rows});
  device_parents_ = backend.allocate(DType::kInt32, {max_rows});
  device_row_begin_ = backend.allocate(DType::kInt32, {max_sequences + 1});
  device_prefix_len_ = backend.allocate(DType::kInt32, {max_sequences});
  device_block_table_ = backend.allocate(DType::kInt32, {max_sequences, max_blocks});
  clear();
}

void RowBatch::clear() {
  for (auto* list : {&token_ids_, &positions_, &parents_, &prefix_len_, &block_table_})
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

void RowBatch::upload() {
  const auto sequences = static_cast<int64_t>(prefix_len_.size());
  backend_.upload(token_ids(), token_ids_.data());
  backend_.upload(positions(), positions_.data());
  backend_.upload(device_parents_.tensor.rows(0, num_rows()), parents_.data());
  backend_.upload(device_row_begin_.tensor.rows(0, sequences + 1), row_begin_.data());
  backend_.upload(device_prefix_len_.tensor.rows(0, sequences), prefix_len_.data());
  backend_.upload(device_block_table_.tensor.rows(0, sequences), block_table_.data());
}

SequenceRows RowBatch::rows() const {
  const auto sequences = static_cast<int64_t>(prefix_len_.size());
  return {.row_begin = device_row_begin_.tensor.rows(0, sequences + 1),
          .prefix_len = device_prefix_len_.tensor.rows(0, sequences),
          .block_table = device_block_table_.tensor.rows(0, sequences),
          .parents = device_parents_.tensor.rows(0, num_rows())};
}

}  // namespace kdt
