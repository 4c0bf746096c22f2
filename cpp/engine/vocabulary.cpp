// Choices over the vocabulary, of which each rank has a part.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"
#include "engine/limits.h"
#include "engine/sampler.h"

namespace kdt {

Tensor Engine::logits_of(int64_t begin, int64_t count) {
  const Tensor logits = logits_.tensor.rows(0, count);
  target_->lm_head(target_->hidden(begin + count).rows(begin, count), logits);
  return logits;
}

void Engine::choose_likeliest(const Tensor& logits, int64_t row, int64_t count) {
  const int64_t rows = logits.dim(0);
  const Tensor ids = token_out_.tensor.rows(row, rows);
  if (!communicator_) {
    backend_->argmax({.logits = logits, .ids = ids});
    return;
  }
  const Tensor values(token_out_.tensor.rows(count + row, rows).raw(), DType::kFloat32, {rows});
  backend_->argmax(
      {.logits = logits, .ids = ids, .values = values, .first_id = target_->vocab_begin()});
}

void Engine::gather_likeliest(int64_t count) {
  if (!communicator_) return;
  const int64_t size = shard_.size;
  communicator_->all_gather(token_out_.tensor.rows(0, 2 * count),
                            gathered_.tensor.rows(0, size * 2 * count).view({size, 2 * count}));
}

void Engine::choose_tokens(int64_t count) {
  for (int64_t row = 0; row < count; row += kLogitRows)
    choose_likeliest(logits_of(row, std::min(kLogitRows, count - row)), row, count);
  gather_likeliest(count);
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

std::vector<std::vector<int32_t>> Engine::next_tokens(const std::vector<PassRows>& parts) {
  const int64_t begin = parts.front().begin, end = parts.back().end(), count = end - begin;
  bool any_greedy = false;
  std::vector<Candidates> candidates(parts.size());
  for (int64_t row = begin; row < end; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, end - row);
    const Tensor logits = logits_of(row, rows);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t first = std::max(parts[i].begin, row);
      const int64_t last = std::min(parts[i].end(), row + rows);
      if (first >= last) continue;
      const Tensor own = logits.rows(first - row, last - first);
      if (parts[i].request->is_greedy()) {
        choose_likeliest(own, first - begin, count);
        any_greedy = true;
      } else {
        const int64_t width = std::min(kSampleHead, config_.vocab_size);
        fetch_candidates(own, parts[i].request->options.temperature, width, candidates[i]);
      }
    }
  }
  std::vector<int32_t> likeliest;
  if (any_greedy) {
    gather_likeliest(count);
    likeliest = chosen_tokens(count);
  }
  std::vector<std::vector<int32_t>> tokens;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].request->is_greedy()) {
      const auto first = likeliest.begin() + (parts[i].begin - begin);
      tokens.emplace_back(first, first + parts[i].count());
    } else {
      tokens.push_back(drawn_tokens(parts[i], candidates[i]));
    }
  }
  return tokens;
}

std::vector<int32_t> Engine::drawn_tokens(const PassRows& part, const Candidates& candidates) {
  const RequestOptions& options = part.request->options;
  const auto length = static_cast<int64_t>(part.request->token_ids.size());
  const auto width = static_cast<int64_t>(candidates.ids.size()) / part.count();
  const auto token_of = [&](int32_t slot) {
    const Noise noise(options.seed, length + (slot == 0 ? 0 : part.tree->depths[slot]));
    const auto of_slot = [&](const auto& list) {
      return std::span(list).subspan(slot * width, width);
    };
    const auto token = draw(of_slot(candidates.logprobs), of_slot(candidates.ids),
                            width == config_.vocab_size, options, noise);
    if (token) return *token;
    std::vector<float> logits;
    append_logits(part.begin + slot, 1, logits);
    const SortedRow all(logits, options.temperature);
    return *draw(all.logprobs, all.ids, true, options, noise);
  };
  // Only of the slots that the walk will come to: a whole row may be needed for one.
  std::vector<int32_t> tokens(part.count(), -1);
  for (int32_t slot = 0; slot >= 0; slot = part.tree->child(slot, tokens[slot]))
    tokens[slot] = token_of(slot);
  return tokens;
}

void Engine::append_logits(int64_t begin, int64_t count, std::vector<float>& out) {
  const int64_t part = target_->vocab_local();
  std::vector<float> parts;
  for (int64_t row = begin; row < begin + count; row += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, begin + count - row);
    const Tensor logits = logits_of(row, rows);
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

void Engine::fetch_candidates(const Tensor& logits, double temperature, int64_t width,
                              Candidates& out) {
  const auto [logprobs, ids] = candidates(logits.dim(0), width);
  choose_candidates(logits, temperature, logprobs, ids);
  const int64_t count = logprobs.numel();
  std::vector<int32_t> words(2 * count);
  backend_->download(words.data(), candidates_.tensor.rows(0, 2 * count));
  const size_t at = out.ids.size();
  out.logprobs.resize(at + count);
  std::memcpy(out.logprobs.data() + at, words.data(), count * sizeof(float));
  out.ids.insert(out.ids.end(), words.begin() + count, words.end());
}

std::pair<Tensor, Tensor> Engine::candidates(int64_t rows, int64_t width) const {
  const int64_t count = rows * width;
  return {Tensor(candidates_.tensor.raw(), DType::kFloat32, {rows, width}),
          candidates_.tensor.rows(count, count).view({rows, width})};
}

void Engine::choose_noisy_candidates(const Request& request, const Tensor& logits,
                                     const Tensor& logprobs, const Tensor& ids) {
  const RequestOptions& options = request.options;
  const int64_t rows = logprobs.dim(0), width = logprobs.dim(1);
  // At least all that noise can lift over others.
  const int64_t count = std::max(width, std::min(kSampleHead, config_.vocab_size));
  Candidates candidates;
  fetch_candidates(logits, options.draft_temperature, count, candidates);
  const auto length = static_cast<int64_t>(request.token_ids.size());
  for (int64_t row = 0; row < rows; ++row) {
    const auto logprobs_of_row = std::span(candidates.logprobs).subspan(row * count, count);
    const auto ids_of_row = std::span(candidates.ids).subspan(row * count, count);
    add_noise(logprobs_of_row, ids_of_row, options, Noise(options.seed, length + row));
    std::copy_n(logprobs_of_row.begin(), width, candidates.logprobs.begin() + row * width);
    std::copy_n(ids_of_row.begin(), width, candidates.ids.begin() + row * width);
  }
  backend_->upload(logprobs, candidates.logprobs.data());
  backend_->upload(ids, candidates.ids.data());
}

double Engine::agreed(double ms) {
  if (group_ != nullptr) group_->broadcast(&ms, sizeof(ms));
  return ms;
}

}  // namespace kdt
