// Choices over the vocabulary, of which each rank has a part.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"
#include "engine/limits.h"
#include "engine/sampler.h"

namespace kdt {

void Engine::choose_tokens(int64_t begin, int64_t count) {
  for (int64_t row = 0; row < count; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, count - row);
    const Tensor logits = logits_.tensor.rows(0, rows);
    const Tensor ids = token_out_.tensor.rows(row, rows);
    target_->lm_head(target_->hidden(begin + row + rows).rows(begin + row, rows), logits);
    if (!communicator_) {
      backend_->argmax({.logits = logits, .ids = ids});
      continue;
    }
    const Tensor values(token_out_.tensor.rows(count + row, rows).raw(), DType::kFloat32, {rows});
    backend_->argmax(
        {.logits = logits, .ids = ids, .values = values, .first_id = target_->vocab_begin()});
  }
  if (!communicator_) return;
  const int64_t size = shard_.size;
  communicator_->all_gather(token_out_.tensor.rows(0, 2 * count),
                            gathered_.tensor.rows(0, size * 2 * count).view({size, 2 * count}));
}

std::vector<int32_t> Engine::chosen_tokens(int64_t count) {
  std::vector<int32_t> tokens(count);
  if (!communicator_) {
    backend_->download(tokens.data(), token_out_.tensor.rows(0, count));
    return tokens;
  }
  std::vector<int32_t> words(shard_.size * 2 * count);
  backend_->download(words.data(), gathered_.tensor.rows(0, shard_.size * 2 * count));
  for (int64_t row = 0; row < count; ++row) {
    int32_t best = -1;
    float best_value = 0;
    // Ranks hold ascending ids, so of equals the first is the lowest.
    for (int64_t rank = 0; rank < shard_.size; ++rank) {
      const int32_t* const of_rank = words.data() + rank * 2 * count;
      const int32_t id = of_rank[row];
      float value;
      std::memcpy(&value, &of_rank[count + row], sizeof(value));
      if (id >= 0 && (best < 0 || value > best_value)) {
        best = id;
        best_value = value;
      }
    }
    tokens[row] = best;
  }
  return tokens;
}

std::vector<int32_t> Engine::next_tokens(const Request& request, const DraftTree& tree,
                                         int64_t first_row) {
  if (!request.is_greedy()) return sampled_tokens(request, tree, first_row);
  const int64_t slots = std::max<int64_t>(1, tree.num_nodes());
  choose_tokens(first_row, slots);
  return chosen_tokens(slots);
}

std::vector<int32_t> Engine::sampled_tokens(const Request& request, const DraftTree& tree,
                                            int64_t first_row) {
  const RequestOptions& options = request.options;
  const int64_t slots = std::max<int64_t>(1, tree.num_nodes());
  const int64_t width = std::min(kSampleCandidates, config_.vocab_size);
  std::vector<float> logprobs(slots * width);
  std::vector<int32_t> ids(slots * width);
  for (int64_t slot = 0; slot < slots; slot += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, slots - slot), row = first_row + slot;
    const Tensor logits = logits_.tensor.rows(0, rows);
    target_->lm_head(target_->hidden(row + rows).rows(row, rows), logits);
    const Tensor some = logprobs_.tensor.rows(0, rows * width).view({rows, width});
    const Tensor some_ids = candidate_ids_.tensor.rows(0, rows * width).view({rows, width});
    choose_candidates(logits, options.temperature, some, some_ids);
    backend_->download(logprobs.data() + slot * width, some);
    backend_->download(ids.data() + slot * width, some_ids);
  }

  const auto length = static_cast<int64_t>(request.token_ids.size());
  const auto token_of = [&](int32_t slot) {
    const Noise noise(options.seed, length + (slot == 0 ? 0 : tree.depths[slot]));
    const auto likeliest = [&](const auto& list) {
      return std::span(list).subspan(slot * width, width);
    };
    const auto token =
        draw(likeliest(logprobs), likeliest(ids), width == config_.vocab_size, options, noise);
    if (token) return *token;
    std::vector<float> logits;
    append_logits(first_row + slot, 1, logits);
    const SortedRow all(logits, options.temperature);
    return *draw(all.logprobs, all.ids, true, options, noise);
  };
  std::vector<int32_t> tokens(slots, -1);
  for (int32_t slot = 0; slot >= 0; slot = tree.child(slot, tokens[slot]))
    tokens[slot] = token_of(slot);
  return tokens;
}

void Engine::append_logits(int64_t begin, int64_t count, std::vector<float>& out) {
  const int64_t part = target_->vocab_local();
  std::vector<float> parts;
  for (int64_t row = begin; row < begin + count; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, begin + count - row);
    const Tensor logits = logits_.tensor.rows(0, rows);
    target_->lm_head(target_->hidden(row + rows).rows(row, rows), logits);
    const size_t at = out.size();
    out.resize(at + rows * config_.vocab_size);
    if (!communicator_) {
      backend_->download(out.data() + at, logits);
      continue;
    }
    const Tensor all(gathered_.tensor.raw(), DType::kFloat32, {shard_.size, rows, part});
    communicator_->all_gather(logits, all);
    parts.resize(all.numel());
    backend_->download(parts.data(), all);
    for (int64_t rank = 0; rank < shard_.size; ++rank) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(parts.data() + (rank * rows + r) * part, part,
                    out.data() + at + r * config_.vocab_size + rank * part);
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
  // Each rank's best, gathered as they lie one after another, then the best of those.
  const int64_t rows = logits.dim(0), size = shard_.size;
  const int64_t width = std::min(logprobs.dim(1), target_->vocab_local());
  const int64_t count = rows * width, words = 2 * count + rows;
  const Tensor part = part_topk_.tensor.rows(0, words);
  const Tensor all = gathered_.tensor.rows(0, size * words).view({size, words});
  backend_->topk_logprobs(
      {.logits = logits,
       .temperature = static_cast<float>(temperature),
       .logprobs = Tensor(part.raw(), DType::kFloat32, {rows, width}),
       .ids = part.rows(count, count).view({rows, width}),
       .log_sums = Tensor(part.rows(2 * count, rows).raw(), DType::kFloat32, {rows}),
       .first_id = target_->vocab_begin()});
  communicator_->all_gather(part, all);
  backend_->merge_topk({.parts = all, .logprobs = logprobs, .ids = ids});
}

double Engine::agreed(double ms) {
  if (group_ != nullptr) group_->broadcast(&ms, sizeof(ms));
  return ms;
}

}  // namespace kdt
