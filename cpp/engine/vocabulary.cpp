// Choices over the vocabulary, of which each rank has a part.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"

namespace kdt {

std::vector<int32_t> Engine::next_tokens(int64_t begin, int64_t count) {
  std::vector<int32_t> tokens(count);
  const int64_t size = shard_.size;
  std::vector<int32_t> words;
  for (int64_t row = 0; row < count; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, count - row);
    const Tensor logits = logits_.tensor.rows(0, rows);
    const Tensor ids = token_out_.tensor.rows(0, rows);
    target_->lm_head(target_->hidden(begin + row + rows).rows(begin + row, rows), logits);
    if (!communicator_) {
      backend_->argmax({.logits = logits, .ids = ids});
      backend_->download(tokens.data() + row, ids);
      continue;
    }
    const Tensor values(token_out_.tensor.rows(rows, rows).raw(), DType::kFloat32, {rows});
    backend_->argmax({.logits = logits,
                      .ids = ids,
                      .values = values,
                      .first_id = target_->vocab_begin()});
    const Tensor all = gathered_.tensor.rows(0, size * 2 * rows);
    communicator_->all_gather(token_out_.tensor.rows(0, 2 * rows), all.view({size, 2 * rows}));
    words.resize(size * 2 * rows);
    backend_->download(words.data(), all);
    for (int64_t r = 0; r < rows; ++r) {
      int32_t best = -1;
      float best_value = 0;
      // Ranks hold ascending ids, so of equals the first is the lowest.
      for (int64_t rank = 0; rank < size; ++rank) {
        const int32_t id = words[rank * 2 * rows + r];
        float value;
        std::memcpy(&value, &words[rank * 2 * rows + rows + r], sizeof(value));
        if (id >= 0 && (best < 0 || value > best_value)) {
          best = id;
          best_value = value;
        }
      }
      tokens[row + r] = best;
    }
  }
  return tokens;
}

void Engine::append_logits(int64_t num_rows, std::vector<float>& out) {
  const int64_t part = target_->vocab_local();
  std::vector<float> parts;
  for (int64_t row = 0; row < num_rows; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, num_rows - row);
    const Tensor logits = logits_.tensor.rows(0, rows);
    target_->lm_head(target_->hidden(row + rows).rows(row, rows), logits);
    const size_t begin = out.size();
    out.resize(begin + rows * config_.vocab_size);
    if (!communicator_) {
      backend_->download(out.data() + begin, logits);
      continue;
    }
    const Tensor all(gathered_.tensor.raw(), DType::kFloat32, {shard_.size, rows, part});
    communicator_->all_gather(logits, all);
    parts.resize(all.numel());
    backend_->download(parts.data(), all);
    for (int64_t rank = 0; rank < shard_.size; ++rank) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(parts.data() + (rank * rows + r) * part, part,
                    out.data() + begin + r * config_.vocab_size + rank * part);
      }
    }
  }
}

void Engine::choose_candidates(const Tensor& logits, double temperature, const Tensor& logprobs,
                               const Tensor& ids) {
  if (!communicator_) {
    backend_->topk_logprobs({.logits = logits,
                             .temperature = static_cast<float>(temperature),
                             .logprobs = logprobs,
                             .ids = ids});
    return;
  }
  // Each rank's best, then the best of those.
  const int64_t rows = logits.dim(0), size = shard_.size;
  const int64_t width = std::min(logprobs.dim(1), target_->vocab_local());
  int64_t used = 0;
  const auto piece = [&](const Buffer& buffer, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor tensor(static_cast<char*>(buffer.tensor.raw()) + used * 4, dtype, shape);
    used += tensor.numel();
    return tensor;
  };
  const Tensor part_logprobs = piece(part_topk_, DType::kFloat32, {rows, width});
  const Tensor part_ids = piece(part_topk_, DType::kInt32, {rows, width});
  const Tensor log_sums = piece(part_topk_, DType::kFloat32, {rows});
  backend_->topk_logprobs({.logits = logits,
                           .temperature = static_cast<float>(temperature),
                           .logprobs = part_logprobs,
                           .ids = part_ids,
                           .log_sums = log_sums,
                           .first_id = target_->vocab_begin()});
  used = 0;
  const MergeTopkArgs merge{.part_logprobs = piece(gathered_, DType::kFloat32, {size, rows, width}),
                            .part_ids = piece(gathered_, DType::kInt32, {size, rows, width}),
                            .log_sums = piece(gathered_, DType::kFloat32, {size, rows}),
                            .logprobs = logprobs,
                            .ids = ids};
  communicator_->all_gather(part_logprobs, merge.part_logprobs);
  communicator_->all_gather(part_ids, merge.part_ids);
  communicator_->all_gather(log_sums, merge.log_sums);
  backend_->merge_topk(merge);
}

double Engine::agreed(double ms) {
  if (group_ != nullptr) group_->broadcast(&ms, sizeof(ms));
  return ms;
}

}  // namespace kdt
