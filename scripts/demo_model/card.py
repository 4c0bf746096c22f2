"""The texts that go with the model: MODEL_CARD.md and NOTICE."""

from pathlib import Path
from typing import Any

from .config import TargetConfig

_LICENCES = Path(__file__).parent / "data" / "licences"

_CARD = """\
# k2-nano

A very small model of Kimi K2's architecture with its DFlash drafter: {total:.1f} M parameters
in the target, {drafter:.1f} M in the drafter. It exists so that the engine can be tried, tested
and measured on real text without a large download. It completes Python functions with good
form and local sense; it does not reason and knows next to nothing. Chat is a toy.

## Architecture

{layers} layers, hidden size {hidden}, {heads} heads of multi-head latent attention (q rank
{q_rank}, kv rank {kv_rank}), {experts} routed experts of which {top_k} are used and {shared} shared
one, sigmoid router, first {dense} layer dense, yarn factor {yarn:g} to {context} positions,
vocabulary {vocab}.
Routed experts are INT4 in groups of {group} (compressed-tensors `pack-quantized`), all else bf16.
The two norms over latents, `q_a_layernorm` and `kv_a_layernorm`, use an epsilon of {latent_eps:g}
(as transformers' `DeepseekV3ForCausalLM` does whatever `rms_norm_eps` says); config.json states
it as `latent_rms_norm_eps`.

Documents in training began with [BOS] and ended with [EOS], so the tokenizer puts [BOS] before a
prompt (`add_bos_token`); the figures below were measured without it. Chat turns end with
<|im_end|>.

## Training

From scratch on {corpus_mb:.0f} MB of permissively licensed text (NOTICE lists every package):
{steps} steps, {tokens:.0f} M tokens, the last part through INT4. Passes over each stream:
{epochs}. The drafter was trained on {generated:.0f} M tokens that the target
wrote, with the target's distributions as labels, {blocks:.1f} M blocks. The timed stages took
{minutes:.1f} minutes.

## Measured

Held-out text: the packages networkx and sphinx, and 1 % of the files of the other packages.

| text | nats per token | bits per byte |
| --- | --- | --- |
{losses}

INT4 costs at most {int4_cost} nats per token against the weights it was rounded from (before
training through INT4, rounding cost {rounding}).

Tokens per target forward, accepted ones and the bonus, along the model's own continuation:

| prompts | number | chain | tree of 8 | 16 | 32 | 64 |
| --- | --- | --- | --- | --- | --- | --- |
{acceptance}

Greedy text of a model this small loops: the share of repeated 8-grams over the
continuations is {rep_greedy}, at temperature 0.8 {rep_sampled}, in real text {rep_real}. Loops are
easy to draft, so read the row of the prompts with less than 0.15 of repeats beside the first.
The prompts of `bench_function` were chosen because their greedy completion ends and parses.

Of {functions} held-out functions (signature and docstring given), {parse:.0%} parse when completed
greedily and {parse_warm:.0%} at temperature 0.5; {ended} and {ended_warm} end by themselves. In
those that end greedily, {rep_ended} of the 8-grams are repeats.

| gate | bound | value | met |
| --- | --- | --- | --- |
{gates}

One training run; no error bars.

## Samples

Greedy completions of held-out functions, the first three that ended:

{samples}
"""


def _sample(sample: dict[str, Any]) -> str:
    return f"`{sample['path']}`\n```python\n{sample['head']}{sample['body']}```\n"


def model_card(
    config: TargetConfig,
    metrics: dict[str, Any],
    sources: list[dict[str, str]],
    samples: list[dict[str, Any]],
) -> str:
    """The text of MODEL_CARD.md."""
    loss, repeats, training = metrics["losses"], metrics["repeats"], metrics["training"]
    greedy, warm = metrics["functions"]["greedy"], metrics["functions"]["temperature_0.5"]
    settings = ("chain", "tree_8", "tree_16", "tree_32", "tree_64")
    acceptance = [
        f"| {name} | {row['prompts']} | " + " | ".join(f"{row[s]:.2f}" for s in settings) + " |"
        for name, row in metrics["acceptance"].items()
    ]
    nats, bits = loss["nats_per_token"], loss["bits_per_byte"]
    shown = [s for s in samples if s["decoding"] == "greedy" and s["ended"]][:3]
    return _CARD.format(
        total=metrics["parameters"]["target"] / 1e6,
        drafter=metrics["parameters"]["drafter"] / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        shared=config.n_shared_experts,
        dense=config.first_k_dense_replace,
        yarn=config.yarn_factor,
        context=config.max_position_embeddings,
        vocab=config.vocab_size,
        group=config.group_size,
        latent_eps=config.latent_rms_norm_eps,
        corpus_mb=sum(int(row["bytes"]) for row in sources if row["group"] != "heldout") / 1e6,
        steps=training["steps"],
        tokens=training["tokens"] / 1e6,
        epochs=", ".join(f"{k} {v}" for k, v in training["epochs"].items()),
        minutes=sum(training["seconds"].values()) / 60,
        generated=training["generated_tokens"] / 1e6,
        blocks=training["blocks"] / 1e6,
        losses="\n".join(f"| {k} | {nats[k]:.3f} | {bits[k]:.3f} |" for k in nats),
        int4_cost=loss["int4_cost"],
        rounding=training["rounding_cost"],
        acceptance="\n".join(acceptance),
        rep_greedy=repeats["greedy"],
        rep_sampled=repeats["temperature_0.8"],
        rep_real=repeats["real_text"],
        functions=greedy["functions"],
        parse=greedy["parse_share"],
        parse_warm=warm["parse_share"],
        ended=greedy["ended"],
        ended_warm=warm["ended"],
        rep_ended=greedy["repeats_ended"],
        gates="\n".join(
            f"| {g['gate']} | {g['bound']} | {g['value']} | {'yes' if g['met'] else 'no'} |"
            for g in metrics["gates"]
        ),
        samples="\n".join(map(_sample, shown)) or "none ended.",
    )


def notice(sources: list[dict[str, str]], bench: list[dict[str, str]]) -> str:
    """The text of NOTICE: every package the weights were trained or measured on, and the
    licences of those that heldout_prompts.json quotes."""
    quoted_names = {prompt["name"].split("/")[1] for prompt in bench}
    rows, quoted, texts = [], [], {}
    for row in sources:
        name, licence = row["package"], row["licence"]
        holder = f". {row['copyright']}" if row["copyright"] else ""
        if int(row["files"]):
            where = f"{name} {row['version']} ({row['registry']})"
            held_out = ", held out" if row["group"] == "heldout" else ""
            rows.append(f"{where}: {licence}, {row['files']} files{held_out}{holder}")
        if name in quoted_names:
            quoted.append(f"{name}: {licence}{holder}")
            text = _LICENCES / f"{licence}.txt"
            if text.is_file():
                texts[licence] = text.read_text()
    conditions = [f"{licence}:\n\n{text}" for licence, text in sorted(texts.items())]
    return (
        "k2-nano\n\nThe weights in this folder were trained on text from the packages below, each"
        " under the\npermissive licence named; packages marked as held out were only measured on."
        " No text under a\ncopyleft licence was used.\n\n"
        + "\n".join(rows)
        + "\n\nheldout_prompts.json and the samples of MODEL_CARD.md quote short passages of the"
        " following\npackages, under the licences given. The text of Apache-2.0 is in this"
        " project's LICENSE.\n\n" + "\n".join(quoted) + "\n\n" + "\n".join(conditions)
    )
