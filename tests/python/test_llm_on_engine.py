"""`LLM` and the command on the compiled engine: a tiny random model, then the bundled one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdtree_engine import _core
from kdtree_engine.cli import main
from kdtree_engine.llm import ENGINE_LIMITS, LLM, default_model
from kdtree_engine.sampling_params import SamplingParams

METHODS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "dflash"},
    {"method": "ddtree", "tree_budget": 1},
    {"method": "ddtree", "tree_budget": 16},
    {"method": "ddtree", "tree_budget": 64, "tree_topk": 3},
    {"method": "ddtree", "tree_budget": 256, "draft_temperature": 0.5},
    {"method": "ddtree", "tree_budget": "auto"},
]
PROMPTS = ["", "hello world", "def f(x):\n    return x", "世界 😀"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, prefill_chunk_size=8, max_num_seqs=3) as loaded:
        yield loaded


def ids(llm: LLM, prompt: Any, params: SamplingParams, method: dict[str, Any]) -> list[int]:
    return llm.generate(prompt, params, speculative_config=method)[0].outputs[0].token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_method_gives_the_tokens_of_plain_decoding(llm: LLM, prompt: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = ids(llm, prompt, params, METHODS[0])
    assert len(plain) == 40
    for method in METHODS[1:]:
        assert ids(llm, prompt, params, method) == plain, method


def test_drawn_texts_are_repeated_by_their_seed_with_every_method(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 100, "min_p": 0.001}
    free = SamplingParams(max_tokens=30, ignore_eos=True, **options)
    outputs = llm.generate(["hello world"] * 3, free)
    drawn = [output.outputs[0].token_ids for output in outputs]
    assert drawn[0] != drawn[1] != drawn[2]
    for output, tokens in zip(outputs, drawn, strict=True):
        again = SamplingParams(max_tokens=30, ignore_eos=True, seed=output.seed, **options)
        for method in METHODS:
            assert ids(llm, "hello world", again, method) == tokens, method
    greedy = SamplingParams(max_tokens=30, ignore_eos=True, top_k=3, top_p=0.5, min_p=0.5, seed=7)
    plain = SamplingParams(max_tokens=30, ignore_eos=True)
    assert ids(llm, "hello", greedy, METHODS[3]) == ids(llm, "hello", plain, METHODS[0])


def test_prompts_together_give_what_each_gives_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    together = llm.generate(PROMPTS * 2, params)  # more than max_num_seqs
    for prompt, output in zip(PROMPTS * 2, together, strict=True):
        alone = llm.generate(prompt, params)[0]
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].text == alone.outputs[0].text


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    output = llm.generate("hello", params)[0].outputs[0]
    assert output.text == llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=True)
    assert "".join(c.text for c in llm.stream("hello", params)) == output.text


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_few_tokens(llm: LLM, max_tokens: int, method: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    output = llm.generate("hello world", params, speculative_config=method)[0].outputs[0]
    assert len(output.token_ids) == max_tokens and output.finish_reason == "length"


@pytest.mark.parametrize("method", METHODS)
def test_up_to_the_end_of_the_context(tiny_model: Path, method: dict[str, Any]) -> None:
    with LLM(tiny_model, num_threads=1, max_model_len=48, speculative_config=method) as llm:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": list(range(40))}, params)[0].outputs[0]
        assert len(output.token_ids) == 8 and output.finish_reason == "length"
        full = llm.generate({"prompt_token_ids": [7] * 48}, params)[0].outputs[0]
        assert full.token_ids == [] and full.finish_reason == "length"
        with pytest.raises(ValueError, match="49"):
            llm.generate({"prompt_token_ids": [7] * 49}, params)
        assert len(llm.generate("hello", params)[0].outputs[0].token_ids) > 8


@pytest.mark.parametrize("token_id", [-1, 512, 2**31, 2**70])
def test_token_ids_out_of_range(llm: LLM, token_id: int) -> None:
    with pytest.raises(ValueError, match=str(token_id)):
        llm.generate({"prompt_token_ids": [1, token_id]})
    with pytest.raises(ValueError, match=str(token_id)):
        llm.generate("hello", SamplingParams(stop_token_ids=[token_id]))


def test_a_stop_token_inside_an_accepted_chunk(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = ids(llm, "hello world", params, METHODS[0])
    for at in range(1, 12):
        stopping = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[plain[at]])
        want = plain[: plain.index(plain[at]) + 1]
        for method in METHODS:
            output = llm.generate("hello world", stopping, speculative_config=method)[0].outputs[0]
            assert output.token_ids == want, (at, method)
            assert output.finish_reason == "stop" and output.stop_reason == plain[at]


def test_a_stop_string_inside_an_accepted_chunk(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    text = llm.generate("hello", params)[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    outputs = [
        llm.generate(
            "hello",
            SamplingParams(max_tokens=60, ignore_eos=True, stop=stop),
            speculative_config=method,
        )[0].outputs[0]
        for method in METHODS
    ]
    assert outputs[0].text == text[: text.index(stop)] and outputs[0].stop_reason == stop
    assert all(o == outputs[0] for o in outputs[1:])


def test_a_closed_stream_leaves_room_for_others(llm: LLM) -> None:
    for _ in range(6):  # more than max_num_seqs
        with llm.stream("hello", SamplingParams(max_tokens=100)) as stream:
            next(stream)
    assert llm.stats()["active_requests"] == llm.stats()["waiting_requests"] == 0
    assert llm.generate("hello")[0].finished


def test_statistics_add_up(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    before = llm.stats()["target_forwards"]
    spec = llm.generate("hello", params, speculative_config=METHODS[3])[0].spec
    histogram = spec.accept_length_histogram
    assert sum(histogram.values()) == spec.target_forwards
    assert spec.decoded_tokens == 29  # the first came from the prefill
    assert sum(length * n for length, n in histogram.items()) == spec.decoded_tokens
    assert spec.timings["verify_ms"] > 0 and spec.timings["decode_ms"] > spec.timings["verify_ms"]
    assert llm.stats()["target_forwards"] - before >= spec.target_forwards
    plain = llm.generate("hello", params, speculative_config=METHODS[0])[0].spec
    assert set(plain.accept_length_histogram) == {1} and plain.tokens_per_forward == 1.0


def test_costs_are_measured_at_load_when_there_is_a_drafter(tiny_model: Path) -> None:
    with LLM(tiny_model, num_threads=1) as llm:
        assert llm.stats()["verify_cost"] and llm.stats()["draft_cost_ms"] > 0
    with LLM(tiny_model, num_threads=1, speculative_config={"method": "none"}) as plain:
        assert not plain.stats()["verify_cost"]


def test_progress_reaches_the_total(tiny_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    LLM(tiny_model, num_threads=1, progress=lambda done, total: seen.append((done, total))).close()
    assert seen and seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_a_device_that_is_not_there_says_what_is_missing(tiny_model: Path) -> None:
    words = "KDT_CUDA=ON|no NVIDIA driver|shows no GPU|the driver supports|want 'cuda:0'"
    with pytest.raises((ValueError, RuntimeError), match=f"^device is 'cuda:999'.*({words})"):
        LLM(tiny_model, device="cuda:999")
    for device in ("cuda:", "cuda:x", "cuda:-1", "CPU", "", "check:cpu", "check:cpu,tpu"):
        with pytest.raises(ValueError, match=f"^device is '{device}'; want '"):
            LLM(tiny_model, device=device)


def test_two_back_ends_compared_op_by_op_give_the_tokens_of_one(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(tiny_model, device="cpu") as llm:
        want = [ids(llm, "hello", params, method) for method in METHODS[:3]]
    with LLM(tiny_model, device="check:cpu,cpu") as llm:
        assert llm.stats()["device"] == "check:cpu,cpu"
        assert [ids(llm, "hello", params, method) for method in METHODS[:3]] == want


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "num_threads", "device"])
def test_bad_engine_options_are_named(tiny_model: Path, field: str) -> None:
    value: Any = "tpu" if field == "device" else -1
    with pytest.raises(ValueError, match=f"{field}|{value}"):
        LLM(tiny_model, **{field: value})


@pytest.mark.parametrize("field", ENGINE_LIMITS)
def test_engine_limits_are_the_engines_own(tiny_model: Path, field: str) -> None:
    for limit, beyond in zip(ENGINE_LIMITS[field], (-1, 1), strict=True):
        with pytest.raises(ValueError, match=f"{field} is {limit + beyond};.*{limit}"):
            _core.Engine(str(tiny_model), **{field: limit + beyond})


def test_command_on_the_engine(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    model = ("--model", str(tiny_model), "-t", "1")
    texts = []
    for method in ("none", "dflash", "ddtree"):
        arguments = ("generate", "hello", *model, "--method", method, "-n", "20", "--json")
        status, out, _ = run(*arguments)
        assert status == 0
        texts.append(json.loads(out)["token_ids"])
    assert texts[0] == texts[1] == texts[2] and texts[0]
    status, out, _ = run("tree", "hello", *model, "--svg", str(tmp_path / "t.svg"))
    assert status == 0 and "16 draft nodes" in " ".join(out.split())
    assert (tmp_path / "t.svg").stat().st_size > 1000
    status, out, _ = run("inspect", str(tiny_model), "--json")
    assert status == 0 and json.loads(out)["faults"] == []
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"name": p, "text": p, "kind": "code"} for p in PROMPTS[1:]]))
    arguments = ("--prompts", str(prompts), "-n", "16", "--json", str(tmp_path / "r.json"))
    status, _, err = run("bench", *model, *arguments, "--arithmetic")
    assert status == 0, err
    assert len(json.loads((tmp_path / "r.json").read_text())["settings"]) == 8


def test_a_broken_checkpoint_is_one_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    for file in tiny_model.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config["kv_lora_rank"] = 31
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in (["generate", "hello", "--model"], ["inspect"]):
        with pytest.raises(SystemExit) as end:
            main([*command, str(tmp_path)])
        out, err = capsys.readouterr()
        assert end.value.code == 1 and "kv_" in out + err and "Traceback" not in err
    assert capsys.readouterr().err.count("\n") <= 1


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    if not default_model().is_dir():
        pytest.skip("the bundled model is not in this tree")
    with LLM() as loaded:
        yield loaded


def test_bundled_model_writes_python_the_same_way_by_every_method(bundled: LLM) -> None:
    held_out = json.loads((bundled.model / "heldout_prompts.json").read_text())
    prompts = ["def fibonacci(n):", *(p["text"] for p in held_out[::8])]
    params = SamplingParams(max_tokens=64)
    forwards = []
    for method in METHODS:
        outputs = bundled.generate(prompts, params, speculative_config=method)
        if method == METHODS[0]:
            plain = outputs
        assert [o.outputs for o in outputs] == [o.outputs for o in plain], method
        forwards.append(sum(o.spec.target_forwards for o in outputs))
    text = "".join(o.outputs[0].text for o in plain)
    assert text.count("self") + text.count("return") > 5
    assert forwards[4] < forwards[3] < forwards[1] < forwards[0] / 2  # 64 nodes, 16, chain, plain


def test_bundled_model_answers_in_the_chat_template(bundled: LLM) -> None:
    if bundled.get_tokenizer().chat_template is None:
        pytest.skip("no chat template beside the model")
    messages = [{"role": "user", "content": "Write a Python function `is_even(n)`."}]
    output = bundled.chat(messages, SamplingParams(max_tokens=100))[0].outputs[0]
    assert "def is_even" in output.text and output.finish_reason == "stop"
