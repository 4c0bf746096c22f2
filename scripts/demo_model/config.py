"""Sizes of the target and of the drafter, and the special tokens.

`NANO` is the shipped model; `TINY` has the same shape rules and exists so that every stage
can be run on a CPU in seconds.
"""

from dataclasses import dataclass

# In the order of their ids, which follow the byte-pair ranks. Names are Kimi K2's, but for
# the mask, which is what a DFlash block is filled with and is never sampled.
SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|reserved_0|>",
    "[UNK]",
    "<|mask|>",
    "[PAD]",
)


@dataclass(frozen=True)
class TargetConfig:
    """The target; names follow config.json of DeepSeek-V3 and Kimi K2."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 10
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.0  # sqrt(top-k), as K2 has sqrt(8)
    rms_norm_eps: float = 1e-5
    latent_rms_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm
    rope_theta: float = 50000.0
    yarn_factor: float = 4.0
    original_max_position_embeddings: int = 512
    max_position_embeddings: int = 2048
    group_size: int = 32  # of the INT4 experts, along the input dimension

    @property
    def mergeable_ranks(self) -> int:
        """Number of byte-pair tokens; ids from here on are special."""
        return self.vocab_size - len(SPECIAL_TOKENS)

    def special(self, name: str) -> int:
        """Id of a special token."""
        return self.mergeable_ranks + SPECIAL_TOKENS.index(name)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class DrafterConfig:
    """The DFlash drafter; names follow z-lab's drafter configs (Qwen3 layers)."""

    target_layer_ids: tuple[int, ...] = (1, 3, 6, 8)
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


NANO, NANO_DRAFTER = TargetConfig(), DrafterConfig()

TINY = TargetConfig(
    vocab_size=1024,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    routed_scaling_factor=2.0**0.5,
)
TINY_DRAFTER = DrafterConfig(
    target_layer_ids=(0, 1),
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=128,
)
