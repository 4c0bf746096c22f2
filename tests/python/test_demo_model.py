"""The training code of the bundled model, run end to end with a tiny model on a CPU."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

torch = pytest.importorskip("torch", reason="training code needs PyTorch (extra `train`)")
pytest.importorskip("tokenizers", reason="training code needs tokenizers (extra `train`)")
pytest.importorskip("tiktoken", reason="training code needs tiktoken (extra `train`)")
safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors (extra `train`)")

from scripts.demo_model import acceptance, quant, reload, sources, textfilter, tokenizer  # noqa: E402
from scripts.demo_model.config import TINY, TINY_DRAFTER  # noqa: E402
from scripts.demo_model.decode import Decoder  # noqa: E402
from scripts.demo_model.device import Device  # noqa: E402
from scripts.demo_model.dflash import Drafter  # noqa: E402
from scripts.demo_model.model import Target  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run folder, model folder) of `all --tiny` over modules of the standard library."""
    folder = tmp_path_factory.mktemp("demo_model")
    text = folder / "text"
    text.mkdir()
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module in sorted(stdlib.glob("*.py"))[:80]:
        shutil.copy(module, text)
    run, output = folder / "run", folder / "model"
    command = [sys.executable, "-m", "scripts.demo_model.all", "--tiny", "--text", str(text)]
    command += ["--run", str(run), "--output", str(output), "--minutes", "0.3", "--processes", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run, output


def tensors_of(folder: Path) -> dict[str, "torch.Tensor"]:
    """All tensors that the index names, read from the shard it gives for each."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {f: safetensors.load_file(folder / f) for f in set(index["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(f) for f in files.values()) == len(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def target_of(run: Path) -> Target:
    """The frozen target of a run."""
    target = Target(TINY, torch.float32)
    target.load_state_dict(torch.load(run / "target.pt")["weights"])
    return target.requires_grad_(False)


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, worked out from config.json alone."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        attention = {
            "q_a_proj": (config["q_lora_rank"], hidden),
            "q_a_layernorm": (config["q_lora_rank"],),
            "q_b_proj": (heads * qk, config["q_lora_rank"]),
            "kv_a_proj_with_mqa": (config["kv_lora_rank"] + config["qk_rope_head_dim"], hidden),
            "kv_a_layernorm": (config["kv_lora_rank"],),
            "kv_b_proj": (
                heads * (config["qk_nope_head_dim"] + config["v_head_dim"]),
                config["kv_lora_rank"],
            ),
            "o_proj": (hidden, heads * config["v_head_dim"]),
        }
        for name, shape in attention.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape

        def mlp(prefix: str, inner: int) -> dict[str, tuple[int, int]]:
            return {
                prefix + "gate_proj": (inner, hidden),
                prefix + "up_proj": (inner, hidden),
                prefix + "down_proj": (hidden, inner),
            }

        if i < config["first_k_dense_replace"]:
            dense = mlp(layer + "mlp.", config["intermediate_size"])
            shapes |= {name + ".weight": shape for name, shape in dense.items()}
            continue
        inner = config["moe_intermediate_size"]
        shapes[layer + "mlp.gate.weight"] = (config["n_routed_experts"], hidden)
        shapes[layer + "mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        shared = mlp(layer + "mlp.shared_experts.", inner * config["n_shared_experts"])
        shapes |= {name + ".weight": shape for name, shape in shared.items()}
        for e in range(config["n_routed_experts"]):
            for name, (out, width) in mlp(f"{layer}mlp.experts.{e}.", inner).items():
                shapes[name + ".weight_packed"] = (out, width // 8)
                shapes[name + ".weight_scale"] = (out, width // 32)
                shapes[name + ".weight_shape"] = (2,)
    return shapes


def dequantized(tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Plain float32 weights, the nibbles read with numpy."""
    plain = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            words = tensor.numpy().view(np.uint32)
            nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            q = nibbles.reshape(len(words), -1).astype(np.float32) - 8
            scale = tensors[base + ".weight_scale"].float().numpy()
            assert list(q.shape) == tensors[base + ".weight_shape"].tolist()
            plain[base + ".weight"] = torch.from_numpy(q * np.repeat(scale, 32, axis=1))
        elif kind not in ("weight_scale", "weight_shape"):
            plain[name] = tensor.float()
    return plain


def test_loss_is_finite_and_falls(trained: tuple[Path, Path]) -> None:
    """Both trainings learn, and the held-out losses are those of the history's end."""
    metrics = json.loads((trained[1] / "metrics.json").read_text())
    losses = [h["loss"] for h in metrics["training"]["loss_history"] if "loss" in h]
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 2
    drafted = [h["loss"] for h in metrics["training"]["drafter_history"]]
    assert np.isfinite(drafted).all() and drafted[-1] < drafted[0] - 1
    assert metrics["losses"]["unseen_packages"] < np.log(TINY.vocab_size) - 1
    assert {gate["met"] for gate in metrics["gates"]} <= {True, False}


def test_checkpoint_names_and_shapes(trained: tuple[Path, Path]) -> None:
    """Exactly the tensors that config.json implies, in the dtypes of the format."""
    config = json.loads((trained[1] / "config.json").read_text())
    tensors = tensors_of(trained[1])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(config)
    kinds = {"weight_packed": torch.int32, "weight_shape": torch.int32}
    kinds["e_score_correction_bias"] = torch.float32
    for name, tensor in tensors.items():
        assert tensor.dtype == kinds.get(name.rpartition(".")[2], torch.bfloat16), name
    assert config["model_type"] == "deepseek_v3" and config["latent_rms_norm_eps"] == 1e-6


def test_int4_is_exact(trained: tuple[Path, Path]) -> None:
    """The stored experts are the trained ones, and quantising them again changes nothing."""
    tensors, target = tensors_of(trained[1]), target_of(trained[0])
    plain = dequantized(tensors)
    for i, layer in enumerate(target.layers):
        if layer.dense:
            continue
        for e, kind in itertools.product(
            range(TINY.n_routed_experts), ("gate_proj", "up_proj", "down_proj")
        ):
            name = f"model.layers.{i}.mlp.experts.{e}.{kind}"
            stored = plain[name + ".weight"]
            assert torch.equal(stored, getattr(layer.mlp, kind)[e]), name
            q, scale = quant.quantize(stored, 32)
            assert torch.equal(quant.pack(q), tensors[name + ".weight_packed"])
            assert torch.equal(scale, tensors[name + ".weight_scale"])


def test_reloading_gives_the_trained_model(trained: tuple[Path, Path]) -> None:
    """Exported files read back are the target and drafter that were evaluated."""
    target, drafter = reload.load(trained[1], TINY, TINY_DRAFTER, Device())
    expected = target_of(trained[0]).state_dict()
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    saved = torch.load(trained[0] / "drafter.pt")["weights"]
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, saved[name]), name


def test_shipped_model() -> None:
    """The bundled folder is complete, within its size, and as its config says."""
    folder = ROOT / "python" / "kdtree_engine" / "models" / "k2-nano"
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(folder)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(config)
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= 40_000_000
    for name, weight in list(dequantized(tensors).items())[::50]:
        if ".experts." in name:
            q, _ = quant.quantize(weight, 32)
            base = name.removesuffix(".weight")
            assert torch.equal(quant.pack(q), tensors[base + ".weight_packed"])
    prompts = json.loads((folder / "heldout_prompts.json").read_text())
    encoding = tokenizer.load(folder / "tiktoken.model")
    assert len(prompts) >= 32
    assert max(len(encoding.encode_ordinary(prompt["text"])) for prompt in prompts) <= 250
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(metrics["gates"]) == 7
    packages, digests = sources.pinned(sources.DATA)
    notice = (folder / "NOTICE").read_text()
    assert all(len(digests[package.name]) == 64 for package in packages)
    assert all(package.name in notice for package in packages)


def test_transformers_agrees(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """transformers' own DeepSeek-V3, on the dequantised export, gives our logits."""
    transformers = pytest.importorskip("transformers", reason="needs the extra `train`")
    config = json.loads((trained[1] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    plain = dequantized(tensors_of(trained[1]))
    safetensors.save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(TINY.mergeable_ranks, (2, 200), generator=torch.Generator().manual_seed(0))
    ours = target_of(trained[0])
    with torch.no_grad():
        expected = theirs(ids).logits
        actual = ours.logits(ours(ids)[0])
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()


def test_decoding_with_a_cache_equals_one_causal_pass(trained: tuple[Path, Path]) -> None:
    """Absorbed attention over the latent cache picks the tokens of the plain forward pass."""
    target = target_of(trained[0])
    prompts = torch.randint(256, (4, 12), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([12, 5, 1, 9])
    decoder = Decoder(target, Device(), 4, 120)
    rows = decoder.run(prompts, lengths, torch.zeros(4))
    logits = target.logits(target(rows)[0])
    logits[..., TINY.special("<|mask|>")] = float("-inf")
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(rows[row, :length], prompts[row, :length])
        # a token may differ only where the two best are a rounding error apart
        best = logits[row, length - 1 : -1].max(-1).values
        picked = logits[row, length - 1 : -1].gather(1, rows[row, length:, None])[:, 0]
        assert (best - picked).max() < 1e-4


def test_drafter_block_sees_only_earlier_features(trained: tuple[Path, Path]) -> None:
    """Features at the anchor and after it have no effect on a block, earlier ones do."""
    config = json.loads((trained[1] / "drafter" / "config.json").read_text())
    weights = safetensors.load_file(trained[1] / "drafter" / "model.safetensors")
    drafter = Drafter(TINY_DRAFTER, TINY).requires_grad_(False)
    drafter.load_state_dict({name: w.float() for name, w in weights.items()})
    assert config["dflash_config"] == {
        "target_layer_ids": list(TINY_DRAFTER.target_layer_ids),
        "mask_token_id": TINY.special("<|mask|>"),
    }
    target = target_of(trained[0])
    ids = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(2))
    features = target(ids, TINY_DRAFTER.target_layer_ids)[1]
    anchors = torch.tensor([[20, 40]])
    embedded = drafter.embed_blocks(target, ids, anchors)
    base = drafter(embedded, features, anchors)
    changed = features.clone()
    changed[:, 20:] += 1
    moved = drafter(embedded, changed, anchors)
    assert torch.allclose(moved[:, 0], base[:, 0], atol=1e-6)
    assert not torch.allclose(moved[:, 1], base[:, 1], atol=1e-3)


def test_tokenizer_files(trained: tuple[Path, Path]) -> None:
    """Ranks, added tokens and chat template fit together."""
    lines = (trained[1] / "tiktoken.model").read_text().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert [int(line.split()[1]) for line in lines] == list(range(TINY.mergeable_ranks))
    assert len(set(tokens)) == len(tokens) and tokens[:256] == [bytes([b]) for b in range(256)]
    settings = json.loads((trained[1] / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True  # every training document begins with it
    added = {int(i): t["content"] for i, t in settings["added_tokens_decoder"].items()}
    assert sorted(added) == list(range(TINY.mergeable_ranks, TINY.vocab_size))
    encoding = tokenizer.load(trained[1] / "tiktoken.model")
    assert all(encoding.encode_single_token(name) == i for i, name in added.items())
    text = "def f(x):\n    return x + 1234567  # naïve 世界\n\n\n"
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    jinja2 = pytest.importorskip("jinja2", reason="rendering the chat template needs jinja2")
    template = (trained[1] / "chat_template.jinja").read_text()
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\n"}]
    rendered = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert rendered == (
        "<|im_system|>system<|im_middle|>a<|im_end|><|im_user|>user<|im_middle|>b\n<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_other_files(trained: tuple[Path, Path]) -> None:
    """Prompts, generation settings, card and notice are there and agree with the rest."""
    folder = trained[1]
    encoding = tokenizer.load(folder / "tiktoken.model")
    prompts = json.loads((folder / "heldout_prompts.json").read_text())
    assert prompts
    for prompt in prompts:
        assert set(prompt) == {"name", "text", "kind"} and prompt["kind"] in ("code", "function")
        assert 0 < len(encoding.encode_ordinary(prompt["text"])) <= 250
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [TINY.special("<|im_end|>"), TINY.special("[EOS]")]
    card = (folder / "MODEL_CARD.md").read_text()
    assert "latent_rms_norm_eps" in card and "{" not in card.split("## Samples")[0]
    assert "text 0 (local)" in (folder / "NOTICE").read_text()


def test_filters() -> None:
    """Copyleft, vendored and unparsable files are dropped, near copies too."""
    good = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n" for i in range(9))
    assert textfilter.clean(good, "a/b.py", True) == good
    assert textfilter.clean("# GNU General Public License\n" + good, "b.py", True) is None
    assert textfilter.clean("# MPL 2.0: Mozilla Public License\n" + good, "b.py", True) is None
    assert textfilter.clean(good, "pip/_vendor/b.py", True) is None
    assert textfilter.clean(good + "print 1\n", "b.py", True) is None
    duplicates = textfilter.NearDuplicates()
    assert duplicates.admit(good)
    assert not duplicates.admit(good.replace("function_0", "other"))
    assert duplicates.admit(good.replace("argument", "parameter_"))


def test_entry_sizes_against_all_paths() -> None:
    """The best-first tree takes nodes in the order of their probability."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        depth, width, budget = 3, 4, 30
        logprobs = np.sort(rng.normal(-1, 1, (depth, width)) - 2, axis=1)[:, ::-1]
        ranks = rng.integers(0, width + 1, depth)
        nodes = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
        nodes.sort(key=lambda p: -sum(logprobs[i, r] for i, r in enumerate(p)))
        expected = [0] * depth
        for d in range(depth):
            path = tuple(int(r) for r in ranks[: d + 1])
            if path in nodes[:budget]:
                expected[d] = nodes.index(path) + 1
        assert acceptance.entry_sizes(logprobs, ranks, budget) == expected
