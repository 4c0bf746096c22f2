"""Types of the compiled module.

An argument of a wrong type, shape or size is a ValueError naming it and its value. F32 and I32 take
any array of floating-point or integer numbers that the type can hold, in any layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

__version__: str

class RequestOptions:
    """Options of one request; `Engine.add_request` refuses those that do not fit each other."""

    max_tokens: int  # >= 0
    stop_token_ids: list[int]  # generation ends with one of these, which is kept as the last token
    ignore_eos: bool  # do not stop at the checkpoint's own eos ids
    method: str  # "none" | "dflash" | "ddtree"; "" takes the engine's default
    tree_budget: int  # 1..256 draft nodes below the root, 0: chosen each round ("auto")
    tree_topk: int  # candidates a depth, 1 to the budget (64: "auto"), 0: as many as the budget
    # Divides the drafter's logits, 0.001 to 1000; never changes the output. 1 without a tree.
    draft_temperature: float
    # Tokens are drawn as `kdtree_engine.reference.sampling` says; greedy: these have no effect.
    temperature: float  # 0: greedy, else 0.001 to 1000
    top_k: int  # >= 0, 0: all
    top_p: float  # above 0 and at most 1
    min_p: float  # 0 to 1
    seed: int  # 0 to 2**63 - 1
    def __init__(
        self,
        max_tokens: int = 16,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        method: str = "",
        tree_budget: int = 0,
        tree_topk: int = 0,
        draft_temperature: float = 1.0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> None: ...

class Tree:
    """A draft tree as verified; arrays are indexed by slot, slot 0 is the root."""

    tokens: I32  # [n + 1] the root's is -1
    parents: I32  # [n + 1] the root's is -1
    depths: I32  # [n + 1]
    first_child: I32  # [n + 1] -1: none
    next_sibling: I32  # [n + 1] -1: none
    visibility: npt.NDArray[np.bool_]  # [n + 1, n + 1]
    logw: npt.NDArray[np.float64]  # [n + 1] log of the drafter's probability of the path
    accepted: I32  # slots accepted this round, root first

class StepOutput:
    """What one round did for one request."""

    request_id: int
    token_ids: list[int]  # tokens committed by this round
    accept_length: int  # tokens the target's forward committed, bonus included; 0 while prefilling
    num_prefilled: int  # prompt tokens processed so far
    prompt_length: int
    finished: bool
    finish_reason: str  # "", "stop", "length", "error" (the logits were no numbers)
    stop_token_id: int  # the token that stopped it, -1: none
    root_token_id: int  # the tree's root: the last committed token before this round
    tree: Tree | None  # None: a plain step or prefill
    draft_ms: float
    build_ms: float
    verify_ms: float
    commit_ms: float

class Engine:
    """A loaded model with its drafter, and the requests it is working on.

    `model` and `drafter` are checkpoint folders, or "synth:LIKE,layers=N" (also experts, hidden,
    vocab, seed) for one that is made in memory (docs/adr/0015). Raises RuntimeError for files that
    are missing, malformed or not supported and ValueError for bad arguments, each naming the field
    and the value. `progress(done_bytes, total_bytes)` is called while weights load.

    One call at a time: another thread's waits. Signal handlers run between the rounds of
    `generate`; in one, `stats`, `config`, `has_unfinished` and `abort` can be used, the rest is a
    RuntimeError. So is any use in a process forked after loading, but for `config` and `abort`.
    A daemon thread that is in a call when the interpreter ends does not come back from it.
    """

    def __init__(
        self,
        model: str,
        drafter: str | None = None,
        device: str = "cpu",  # or "auto", "cuda", "cuda:N", "check:A,B"
        *,
        num_threads: int = 0,  # 0: one a core
        max_model_len: int = 0,  # 0: the checkpoint's max_position_embeddings
        max_num_seqs: int = 8,
        prefill_chunk_size: int = 256,
        latent_rms_norm_eps: float = 0.0,  # 0: as the checkpoint says
        tensor_parallel_size: int = 1,  # ranks, each a thread with its part of the models
        expert_parallel: bool = False,  # whole experts a rank instead of a slice of each
        timeout_s: float = 300.0,  # how long a rank waits for the others
        progress: Callable[[int, int], None] | None = None,
    ) -> None: ...
    @property
    def is_leader(self) -> bool:
        """False in a process of torchrun, mpirun or srun that follows rank 0's."""
    def follow(self) -> None:
        """In such a process: does what rank 0's process does, until that ends its engine."""
    def add_request(self, prompt_token_ids: Sequence[int], options: RequestOptions) -> int:
        """Queues a request and returns its id.

        ValueError for an empty prompt, one longer than max_model_len, an id outside the vocabulary
        or a bad option; then nothing has changed.
        """
    def step(self) -> list[StepOutput]:
        """One round for each active request: a prefill chunk, or draft to commit."""
    def generate(
        self, prompt_token_ids: Sequence[int], options: RequestOptions
    ) -> list[StepOutput]:
        """Adds a request and steps until it ends; the outputs of its rounds.

        Other requests advance too, and what these rounds did for them is lost to the caller.
        """
    def has_unfinished(self) -> bool: ...
    def abort(self, request_id: int) -> bool:
        """Ends a request at once; False when there is none of that id.

        Never waits: during a call it returns True, and the request ends before the next.
        """
    def logits(self, token_ids: Sequence[int]) -> F32:
        """float32 logits [n, vocab_size] after each of the n tokens."""
    def tree_logits(
        self, prefix_token_ids: Sequence[int], tokens: npt.ArrayLike, parents: npt.ArrayLike
    ) -> F32:
        """float32 logits [m, vocab_size] of each slot of a tree verified in one pass.

        `tokens` [m] (slot 0 is the root and follows the prefix), `parents` [m] (-1 for the root).
        """
    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        target_forwards, draft_forwards, generated_tokens, prefill_tokens; milliseconds by stage
        (prefill_ms, draft_ms, build_ms, verify_ms, commit_ms); active_requests, waiting_requests,
        kv_tokens_free; verify_cost (list of (rows, ms)) and draft_cost_ms, measured at load when
        there is a drafter; model_bytes, device, isa, num_threads. Of the load: load_bytes and
        load_reads (from the files), load_seconds, load_buffer_bytes (host memory at a time).
        """
    def config(self) -> dict[str, Any]:
        """`model` and `drafter` (None without one), by the checkpoints' keys; max_model_len."""

def build_tree(logprobs: F32, token_ids: I32, budget: int) -> dict[str, Any]:
    """The DDTree of [L, K] candidates, each row descending: a dict with the arrays of `Tree`."""

def accept_tree(
    tokens: I32, first_child: I32, next_sibling: I32, target_tokens: I32
) -> tuple[I32, int]:
    """Greedy walk: accepted slots (root first) and the bonus token."""

def missing_ranks() -> str:
    """While an Engine is made in rank 0's process: the ranks of other processes that have not come,
    as "ranks 1, 3 of 4", and processes that were refused; "" when nobody is waited for.
    """

def inspect_checkpoint(
    folder: str,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Config, tensors and faults of a checkpoint folder, from its headers; loads no weights.

    Of a pre-sharded cache `cache` says what it was made for, and `verify` reads it all to compare
    the checksums; `progress(done_bytes, total_bytes)` is called meanwhile, as signal handlers are.
    """

def shard_checkpoint(
    model: str,
    out: str,
    drafter: str | None = None,
    *,
    device: str = "cpu",  # whose layout: "auto", "cpu", "cuda", "cuda:N"
    num_threads: int = 0,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes a pre-sharded cache: layout, read_bytes, written_bytes.

    `out` is a folder that is not there, or empty; it appears when it is whole. ValueError for a bad
    argument and RuntimeError for a file, a model that is malformed, a disk without room. Then, and
    when `progress(written_bytes, bytes_in_all)` or a signal handler raises, nothing is left.
    """

def plan_memory(
    model: str,
    drafter: str | None = None,
    *,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    gpu_memory: int = 0,  # bytes a rank has; 0: not known
    overhead: int | None = None,  # bytes of driver, kernels and communication; None: 2 GiB
    max_model_len: int = 0,
    max_num_seqs: int = 8,
    prefill_chunk_size: int = 256,
) -> dict[str, Any]:
    """What each rank of a GPU will need of its memory, from headers alone; sizes are bytes.

    weights_by_part, weights, workspace, overhead, kv_bytes_per_token, draft_kv_bytes_per_token,
    cache_tokens (set aside for max_num_seqs + 1 sequences of max_model_len), faults (what cannot be
    cut into ranks, what does not fit); with gpu_memory kv_tokens_fit and sequences_fit.
    """

def synth_checkpoint(like: str, *, drafter: bool = False, **numbers: int) -> dict[str, Any]:
    """A checkpoint made by rule; `numbers` are those of `kdtree_engine.synth.plan`, which see.

    config, generation_config (text of the files), vocab_size, num_tensors, bytes (of tensors),
    bytes_by_part, shards (a list of dicts: file, header, offset, bytes), and read(offset, out),
    which fills the buffer `out` with data from `offset` of all shards' data in a row; for use from
    any thread. ValueError names the option that no model can have.
    """

def set_nccl_library(path: str) -> None:
    """Where NCCL's library is, for engines of several ranks made afterwards."""

def measure_cpu(num_threads: int = 0, cache_bytes: int = 16 << 20) -> dict[str, Any]:
    """Ceilings of this CPU, measured in about a second.

    isa, num_threads, fma_gflops, read_gb_s (memory), cache_gb_s (`cache_bytes` again and again).
    """

def bench_ops(device: str, only: str = "") -> list[dict[str, Any]]:
    """Times of the ops of a CUDA device and of its ceilings, as kdtree bench ops prints them.

    op, shape, us, bytes (read once), operations. `only`: moe_experts,
    mla_attention, choice, rows or linear.
    """

def bench_rank(
    model: str,
    *,
    device: str,
    tensor_parallel_size: int,
    rows: list[int],
    context: int,
) -> dict[str, Any]:
    """A forward pass of `rows` rows each on the ranks, and on rank 0 alone with its part of them.

    isa, communication, hidden_size, num_all_reduces (of a pass), load_bytes, load_seconds, times (a
    list of dicts: rows and, in microseconds, alone_us, ranks_us and all_reduce_us of a single sum).
    `model` is a checkpoint folder or a name such as "synth:tiny,layers=3". ValueError names the
    argument.
    """

# Ops of the CPU back end on numpy arrays, for tests and study (see docs/architecture.md).
def op_rms_norm(x: F32, weight: F32, eps: float) -> F32: ...
def op_linear(x: F32, weight: npt.NDArray[Any], scale: npt.NDArray[Any] | None = None) -> F32:
    """x [T, K] times weight [N, K]: float32, or bf16 as uint16 bits.

    For int4 the weight is int32 [N, K / 8] and `scale` bf16 bits [N, K / 32].
    """

def op_topk_logprobs(logits: F32, k: int, temperature: float = 1.0) -> tuple[F32, I32]: ...
def op_topk_part(
    logits: F32, k: int, temperature: float = 1.0, first_id: int = 0
) -> tuple[F32, I32, F32]:
    """For a part of a vocabulary: logit / temperature [R, k], ids [R, k] from first_id on, and the
    logarithm [R] of the sum of exp(logit / temperature)."""

def op_merge_topk(values: F32, ids: I32, log_sums: F32, k: int) -> tuple[F32, I32]:
    """Log-probabilities and ids [R, k] over a vocabulary from what op_topk_part gave for its parts.

    values, ids [N, R, k'], the parts in the order of their ids; log_sums [N, R]; k <= N * k'.
    """

def op_argmax(logits: F32) -> I32: ...
def op_argmax_part(logits: F32, first_id: int = 0) -> tuple[I32, F32]:
    """first_id plus the first greatest of each row [R], and it; -1 and -inf for a row of NaN."""

def op_embed(table: F32, token_ids: I32, first_id: int = 0, vocab_size: int = 0) -> F32:
    """Rows of a table whose first is first_id's, zeros for the vocabulary's other ids.

    vocab_size 0: the table has all rows.
    """

def op_silu_mul(gate_up: F32) -> F32: ...
def op_moe_route(
    logits: F32,
    bias: F32,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scale: float,
) -> tuple[I32, F32]: ...
def op_moe_experts(
    x: F32, ids: I32, weights: F32, gate: F32, up: F32, down: F32, first_expert: int = 0
) -> F32:
    """Sum over experts: x [T, H], ids, weights [T, k], gate, up [E, I, H], down [E, H, I].

    The experts are first_expert and those that follow it; other ids add nothing.
    """

def op_mla_attention(
    q: F32,
    kv: F32,
    w_uk: F32,
    norm_weight: F32,
    eps: float,
    cos_sin: F32,
    interleaved: bool,
    parents: I32,
    prefix_len: int,
    scale: float,
) -> F32:
    """The three ops of absorbed MLA on one sequence; returns [T, heads, rank].

    q [T, heads, nope + rope]; kv [prefix_len + T, rank + rope] before norm and rotation;
    w_uk [heads, rank, nope]; cos_sin [positions, rope]; parents [T].
    """

def op_gqa_attention(
    q: F32,
    k: F32,
    v: F32,
    q_norm: F32,
    k_norm: F32,
    eps: float,
    cos_sin: F32,
    context_len: int,
    causal: bool,
    window: int,
    scale: float,
) -> F32:
    """A drafter block's attention; returns [T, heads, d].

    q [T, heads, d]; k, v [context_len + T, kv_heads, d], before norm and rotation (half-split).
    """
