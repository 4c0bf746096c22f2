// The rows of one forward pass: what the host decides, and its copy on the back end.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"

namespace kdt {

// Where its tensors are on the back end depends on their shapes alone, so that passes of the same
// shapes can be recorded.
class RowBatch {
 public:
  RowBatch(Backend& backend, int64_t max_rows, int64_t max_sequences, int64_t max_blocks);

  void clear();
  // Starts a sequence: `prefix_len` rows are cached in the blocks of `block_table`.
  void begin_sequence(int64_t prefix_len, const std::vector<int32_t>& block_table);
  // Adds a row to the current sequence; `parent` is a slot of it, -1 for its first row.
  void add_row(int32_t token_id, int64_t position, int32_t parent);
  // Adds a chain of tokens, the first at `position`.
  void add_chain(const int32_t* token_ids, int64_t count, int64_t position);
  // Of a pass that gives results for some of its rows.
  void choose_row(int64_t row);
  void upload();

  int64_t num_rows() const { return static_cast<int64_t>(token_ids_.size()); }
  int64_t num_sequences() const { return static_cast<int64_t>(prefix_len_.size()); }
  int64_t num_chosen() const { return static_cast<int64_t>(chosen_rows_.size()); }
  // Valid after upload(). All kInt32.
  const Tensor& token_ids() const { return device_ids_; }            // [T]
  const Tensor& positions() const { return device_positions_; }      // [T]
  const Tensor& chosen_rows() const { return device_chosen_rows_; }  // [n]
  const SequenceRows& rows() const { return device_rows_; }

 private:
  Backend& backend_;
  int64_t max_rows_, max_sequences_, max_blocks_;
  std::vector<int32_t> token_ids_, positions_, parents_, row_begin_, prefix_len_, block_table_,
      chosen_rows_;
  Buffer device_;  // all of them
  Tensor device_ids_, device_positions_, device_chosen_rows_;
  SequenceRows device_rows_;
};

}  // namespace kdt
