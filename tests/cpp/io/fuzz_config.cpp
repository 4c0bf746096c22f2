// Any text is a config whose sizes are in bounds, or an Error.
#include <cstdlib>
#include <string>

#include "core/error.h"
#include "model/config.h"

namespace {

template <typename Parse>
void attempt(Parse parse) {
  try {
    parse();
  } catch (const kdt::Error&) {
  }
}

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  attempt([&] {
    const kdt::ModelConfig c = kdt::parse_model_config(text, "input");
    require(c.hidden_size > 0 && c.vocab_size > 0 && c.qk_rope_head_dim % 2 == 0 &&
            c.moe_layer_freq > 0);
    require(c.n_routed_experts == 0 ||
            (c.n_routed_experts % c.n_group == 0 && c.num_experts_per_tok > 0));
    for (int64_t id : c.eos_token_ids) require(id >= 0 && id < c.vocab_size);
    require(c.rope.factor >= 1 && (!c.rope.yarn || c.rope.original_max_position_embeddings > 0));
  });
  attempt([&] {
    const kdt::DraftConfig c = kdt::parse_draft_config(text, "input");
    require(c.block_size > 1 && c.head_dim % 2 == 0 &&
            c.num_attention_heads % c.num_key_value_heads == 0);
    require(c.layer_causal.size() == static_cast<size_t>(c.num_hidden_layers));
    require(c.layer_window.size() == static_cast<size_t>(c.num_hidden_layers) &&
            !c.target_layer_ids.empty());
  });
  attempt([&] { kdt::parse_generation_eos(text, "input", 100); });
  return 0;
}
