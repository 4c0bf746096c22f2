// The tiny checkpoints of scripts/make_tiny_model.py, loaded, and runs of them.
//
// KDT_TINY_MODEL is the folder that holds one checkpoint a preset; a program is skipped without it.
#pragma once

#include <filesystem>

#include "backend/cache_test.h"
#include "io/safetensors.h"
#include "io/xxh64.h"
#include "model/draft_model.h"
#include "model/loader.h"
#include "model/target_model.h"

namespace kdt::test {

inline std::string models_folder() {
  const char* folder = std::getenv("KDT_TINY_MODEL");
  return folder == nullptr ? "" : folder;
}

inline std::string preset_folder(const std::string& preset) {
  return models_folder() + "/" + preset;
}

#define KDT_MODEL_TEST_MAIN                                              \
  int main(int argc, char** argv) {                                      \
    if (!std::filesystem::exists(::kdt::test::preset_folder("tiny"))) {  \
      std::printf("skipped: KDT_TINY_MODEL is no folder with 'tiny'\n"); \
      return 77;                                                         \
    }                                                                    \
    const int skipped = ::kdt::test::skip_status();                      \
    return skipped != 0 ? skipped : ::kdt::test::run_tests(argc, argv);  \
  }

// Results belong to one checkpoint: the bundle holds the checksums of its files.
inline void expect_weights_of(const KdtrFile& file, const std::string& preset) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(preset_folder(preset))) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<uint64_t> checksums;
  for (const std::string& path : paths) {
    const MmapFile weights(path);
    checksums.push_back(xxh64(weights.data(), weights.size()));
  }
  KDT_CHECK(checksums == values<uint64_t>(file.at("weights_xxh64")), preset,
            ": not the checkpoint of the bundle");
}

// A target with a cache of 8 blocks of 32 positions for each of up to 4 sequences.
class Target {
 public:
  static constexpr int64_t kMaxRows = 160;

  Target(Backend& on, const std::string& preset, std::vector<int64_t> taps = {})
      : on_(on),
        files_(preset_folder(preset)),
        model_({on}, load_model_config(preset_folder(preset)), files_, kMaxRows, 300,
               std::move(taps)),
        batch_(on, kMaxRows, 4, 8),
        cache_(model_.make_cache(32, 32)) {
    load_checkpoint(*model_.take_plan(), {});
  }

  TargetModel& model() { return model_; }
  KvCache& cache() { return *cache_; }
  Backend& backend() { return on_; }

  // The blocks of sequence s, in no order.
  static Ints blocks(int64_t s) {
    Ints list;
    for (int32_t i = 0; i < 8; ++i) list.push_back((i * 5 + 3) % 8 * 4 + static_cast<int32_t>(s));
    return list;
  }

  void clear() { batch_.clear(); }
  // Adds rows of sequence s: a tree behind `prefix_len` cached positions.
  void add(int64_t s, int64_t prefix_len, const Ints& tokens, const Ints& parents) {
    batch_.begin_sequence(prefix_len, blocks(s));
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto depth = static_cast<int64_t>(path_to(parents, static_cast<int64_t>(i)).size()) - 1;
      batch_.add_row(tokens[i], prefix_len + depth, parents[i]);
    }
  }
  // [rows, vocab_size] after each row added.
  Floats run() {
    batch_.upload();
    model_.forward(batch_, *cache_);
    const int64_t rows = batch_.num_rows();
    const Buffer logits = output(on_, {rows, model_.config().vocab_size});
    model_.lm_head(model_.hidden(rows), logits.tensor);
    return download(on_, logits.tensor);
  }
  Floats run(int64_t s, int64_t prefix_len, const Ints& tokens, const Ints& parents) {
    clear();
    add(s, prefix_len, tokens, parents);
    return run();
  }
  Floats run(int64_t s, int64_t prefix_len, const Ints& tokens) {
    return run(s, prefix_len, tokens, chain(static_cast<int64_t>(tokens.size())));
  }
  // Of the rows of the last run.
  Floats features() { return download(on_, model_.features(batch_.num_rows())); }

 private:
  Backend& on_;
  SafetensorsFolder files_;
  TargetModel model_;
  RowBatch batch_;
  std::unique_ptr<KvCache> cache_;
};

// Forward passes are dear where a GPU is emulated or everything runs twice.
inline bool is_slow() { return !on_cpu() && !large_cases(); }

// Whether rows of a model's results are right. A GPU's differ by the rounding of bf16 (the norm of
// a row's error is about 0.006 of the row's), and where a router's choice was within that, the row
// and what attends to it go another way: so the better quarter of the rows must be within 0.02,
// half within 0.15, and none may be unrelated.
template <typename T>
bool are_close(const Floats& rows, const std::vector<T>& expected, int64_t width) {
  if (!on_gpu()) return max_error(rows, expected) < 1e-4;
  if (rows.size() != expected.size() || rows.empty()) return false;
  std::vector<double> errors;
  for (size_t begin = 0; begin < rows.size(); begin += width) {
    double norm = 0, error = 0;
    for (size_t i = begin; i < begin + width; ++i) {
      norm += expected[i] * expected[i];
      error += (rows[i] - expected[i]) * (rows[i] - expected[i]);
    }
    errors.push_back(std::isnan(error) ? kInfinity : std::sqrt(error / norm));
  }
  std::sort(errors.begin(), errors.end());
  const bool close =
      errors[errors.size() / 4] < 0.02 && errors[errors.size() / 2] < 0.15 && errors.back() < 1;
  if (!close) {
    std::printf("errors of rows: a quarter within %g, half %g, all %g\n", errors[errors.size() / 4],
                errors[errors.size() / 2], errors.back());
  }
  return close;
}

inline Ints random_tokens(int64_t n, uint64_t seed) {
  Random random(seed);
  Ints tokens;
  for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>(random.below(512)));
  return tokens;
}

}  // namespace kdt::test
