"""`LLM`: options, results, streams, stop strings, with a scripted engine and with the real one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_core
from kdtree_engine.llm import LLM
from kdtree_engine.sampling_params import SamplingParams, SpeculativeConfig
from kdtree_engine.text_builder import TextBuilder
from kdtree_engine.tokenizer import Tokenizer

HELLO = [259, 264, ord("!"), ord("\n"), 259]  # "hello world!\nhello"
Fake = type[fake_core.Engine]


@pytest.fixture
def llm(fake_engine: Fake) -> LLM:
    fake_engine.script = HELLO
    return LLM()


# ---------------------------------------------------------------- sampling params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, 9e-4, 1001, math.nan, math.inf, "1", None, True)),
        *(("top_p", v) for v in (0, -0.5, 1.1, math.nan, "1", None, True)),
        *(("top_k", v) for v in (-2, 4.0, "4", None, True)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan, "0", None, False)),
        *(("seed", v) for v in (-1, 2**63, 3.0, "3", True)),
        ("n", 2),
        ("n", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 4),
        ("logprobs", 5),
        ("prompt_logprobs", 0),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["x"]),
        ("structured_outputs", {"regex": "a"}),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("max_new_tokens", -2),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.0]),
        ("max_new_tokens", True),
        ("max_completion_tokens", 1.0),
        ("temperature", np.zeros(2)),
        ("logit_bias", np.zeros(2)),
        ("stop", 5),
        ("stop", False),
        ("stop", {"a": 1}),
        ("stop", b"ab"),
        ("stop", [None]),
        ("stop", "a\udcff"),
        ("stop_token_ids", 5),
        ("stop_token_ids", False),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", np.array([[1]])),
        ("stop_token_ids", np.array([True])),
    ],
)
def test_params_that_cannot_be_honoured_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}(\[\d\])? is "):
        SamplingParams(**{field: value})


def test_numbers_too_long_to_show_are_named() -> None:
    with pytest.raises(ValueError, match=r"max_tokens is int \(too large to show\)"):
        SamplingParams(max_tokens=-(10**5000))
    assert SamplingParams(max_tokens=10**5000).max_tokens == 10**5000


def test_params_that_are_not_supported_say_so() -> None:
    with pytest.raises(ValueError, match="n is 2, which this version does not support: it takes"):
        SamplingParams(n=2)


def test_neutral_params_are_taken() -> None:
    params = SamplingParams(temperature=0, top_p=1, top_k=-1, logit_bias={}, bad_words=[])
    assert params.max_tokens == 16 and params.stop == []


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, (0.0, 0, 1.0, 0.0, 0)),
        ({"temperature": 0.001, "seed": 0}, (0.001, 0, 1.0, 0.0, 0)),
        ({"temperature": 1000, "seed": 2**63 - 1}, (1000.0, 0, 1.0, 0.0, 2**63 - 1)),
        (
            {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3},
            (0.7, 40, 0.9, 0.1, 3),
        ),
        ({"temperature": 1, "top_k": -1, "min_p": 1, "seed": 5}, (1.0, 0, 1.0, 1.0, 5)),
        # There are no more than 512 tokens.
        ({"temperature": 1, "top_k": 10**30, "seed": np.int64(5)}, (1.0, 0, 1.0, 0.0, 5)),
        # Greedy, whatever the others are.
        ({"top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 3}, (0.0, 40, 0.9, 0.1, 3)),
    ],
)
def test_sampling_options_reach_the_engine(
    llm: LLM, given: dict[str, Any], added: tuple[float, ...]
) -> None:
    (output,) = llm.generate("hello", SamplingParams(**given))
    (got,) = llm._engine.added
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == added
    assert output.seed == (given["seed"] if "temperature" in given else None)


def test_a_request_without_a_seed_gets_one_that_its_result_carries(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7)
    outputs = llm.generate(["hello"] * 20, params)
    seeds = [output.seed for output in outputs]
    assert seeds == [options.seed for options in llm._engine.added]
    assert len(set(seeds)) == 20 and all(seed is not None and 0 <= seed < 2**53 for seed in seeds)
    assert max(seeds) > 2**48  # type: ignore[type-var,operator]
    assert params.seed is None
    stream = llm.stream("hello", params)
    assert stream.output.seed == llm._engine.added[-1].seed


def test_unknown_params_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize("alias", ["max_new_tokens", "max_completion_tokens"])
def test_aliases_of_max_tokens(alias: str) -> None:
    assert SamplingParams(**{alias: 5}).max_tokens == 5
    assert SamplingParams(max_tokens=5, **{alias: 5}).max_tokens == 5
    with pytest.raises(ValueError, match=alias):
        SamplingParams(max_tokens=6, **{alias: 5})


def test_two_aliases_must_agree() -> None:
    with pytest.raises(ValueError, match="max_new_tokens 16 and max_completion_tokens 5 differ"):
        SamplingParams(max_new_tokens=16, max_completion_tokens=5)


# ---------------------------------------------------------------- speculative config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"budget": 3}, "unknown key 'budget'"),
        ({"method": "eagle"}, "method is 'eagle'"),
        ({"method": None}, "method is None"),
        ({"tree_budget": 0}, "tree_budget is 0, want 1 to 256"),
        ({"tree_budget": 257}, "tree_budget is 257"),
        ({"tree_budget": "64"}, "tree_budget is '64'"),
        ({"tree_budget": 8.0}, r"tree_budget is 8\.0"),
        ({"tree_topk": -1}, "tree_topk is -1"),
        ({"tree_topk": 300}, "tree_topk is 300"),
        ({"draft_temperature": 0}, "draft_temperature is 0"),
        ({"draft_temperature": math.inf}, "draft_temperature is inf"),
        ({"draft_temperature": "1"}, "draft_temperature is '1'"),
        ({"method": "none", "tree_budget": 8}, "tree_budget is 8, method 'none' builds no tree"),
        ({"method": "dflash", "draft_temperature": 2}, "method 'dflash' builds no tree"),
        ({"num_speculative_tokens": 16}, "num_speculative_tokens is 16, the drafter proposes 7"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"num_speculative_tokens": 7.0}, r"num_speculative_tokens is 7\.0"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is None"),
        ({"tree_budget": None}, "tree_budget is None, want an integer or 'auto'"),
        ({"tree_budget": True}, "tree_budget is True"),
        ({"tree_budget": np.array([8, 9])}, r"tree_budget is array\(\[8, 9\]\)"),
        ({"tree_budget": 10**5000}, "tree_budget is int .too large to show., want 1 to 256"),
        ({"tree_topk": None}, "tree_topk is None"),
        ({"tree_budget": 8, "tree_topk": 9}, "tree_topk is 9, more than tree_budget, 8"),
        ({"draft_temperature": 10**400}, "draft_temperature is 1000.*, want 0.001 to 1000"),
        ({"draft_temperature": None}, "draft_temperature is None"),
        ({"draft_temperature": math.nan}, "draft_temperature is nan"),
        ({"method": "none", "draft_temperature": 1.0}, "draft_temperature is 1.0, method 'none'"),
        ({"method": ["none"]}, r"method is \['none'\]"),
        ({"method": "ddtree\0x"}, r"method is 'ddtree\\x00x'"),
        ({"model": None}, "model is None, want a path"),
        ({"model": 5}, "model is 5, want a path"),
        ({"model": "a\0b"}, "model is 'a.x00b': it holds a NUL"),
        ({5: 1}, "unknown key 5"),
        ([], r"speculative_config is \[\], want a dict"),
        (0, "speculative_config is 0, want a dict"),
    ],
)
def test_bad_speculative_configs_are_named(
    fake_engine: Fake, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(speculative_config=config)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_model_len", [True, 1e30, 2**70, -1, "8", 10**5000, np.array([3])]),
        ("num_threads", [None, False, 1.0, 2**31, 99999999999]),
        ("max_num_seqs", [None, 0, True, 2**63]),
        ("prefill_chunk_size", [None, 0, 4097, "x"]),
        ("device", [None, 5, b"cpu", "cpu\0x", "\udcff"]),
        ("model", [5, "", b"x", "a\0b", "\udcff"]),
        ("progress", [5]),
    ],
)
def test_bad_options_are_named(fake_engine: Fake, field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field} is "):
            LLM(**{field: value})


def test_devices_reach_the_engine(fake_engine: Fake) -> None:
    seen: list[str] = []
    init = fake_engine.__init__

    def noting(self: Any, model: str, drafter: str | None, device: str, **options: Any) -> None:
        seen.append(device)
        init(self, model, drafter, device, **options)

    fake_engine.__init__ = noting  # type: ignore[method-assign]
    options: list[dict[str, Any]] = [{}, {"num_threads": 2}]
    options += [{"device": name} for name in ("cpu", "cuda:1", "check:cpu,cuda")]
    for one in options:
        LLM(**one)
    assert seen == ["auto", "cpu", "cpu", "cuda:1", "check:cpu,cuda"]
    LLM(device="check:cpu,cuda", num_threads=1)
    with pytest.raises(ValueError, match="num_threads is 2; device 'cuda:0' has no use for it"):
        LLM(device="cuda:0", num_threads=2)


def test_speculative_options_reach_the_engine(fake_engine: Fake) -> None:
    config = {"tree_budget": 24, "tree_topk": 6, "draft_temperature": 0.5}
    llm = LLM(speculative_config={**config, "num_speculative_tokens": 7})
    llm.generate("hello")
    (added,) = llm._engine.added
    assert added.method == "ddtree"
    assert {name: getattr(added, name) for name in config} == config
    llm.generate("hello", speculative_config={"method": "dflash"})
    llm.generate("hello", speculative_config={"tree_budget": "auto"})
    assert [o.method for o in llm._engine.added[1:]] == ["dflash", "ddtree"]
    assert llm._engine.added[2].tree_budget == 0


def test_method_is_none_without_a_drafter(fake_engine: Fake, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "drafter").rmdir()
    assert LLM().speculative == SpeculativeConfig("none")
    with pytest.raises(ValueError, match=r"method 'ddtree' needs a drafter.*no folder 'drafter'"):
        LLM(speculative_config={"method": "ddtree"})
    with pytest.raises(ValueError, match="no drafter was loaded"):
        LLM().generate("hello", speculative_config={"method": "dflash"})


def test_method_none_loads_no_drafter(fake_engine: Fake) -> None:
    llm = LLM(speculative_config={"method": "none"})
    assert llm.config["drafter"] is None


def test_a_named_drafter_is_loaded(fake_engine: Fake, tmp_path: Path) -> None:
    llm = LLM(speculative_config={"model": tmp_path / "other"})
    assert llm._engine.drafter == str(tmp_path / "other")
    with pytest.raises(ValueError, match="model can only be set when the LLM is made"):
        llm.generate("hello", speculative_config={"model": "x"})


def test_a_model_that_is_no_folder(fake_engine: Fake) -> None:
    with pytest.raises(ValueError, match="'org/model' is not a folder"):
        LLM("org/model")


# ---------------------------------------------------------------- prompts and results


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(["hello", "hello world, hello", "a"])
    assert [o.prompt for o in outputs] == ["hello", "hello world, hello", "a"]
    assert outputs[0].prompt_token_ids == [500, 259]
    for output in outputs:
        (completion,) = output.outputs
        assert completion.text == "hello world!\nhello" and completion.token_ids == HELLO
        assert completion.finish_reason == "length" and output.finished
    assert not llm._running


def test_all_prompts_run_together(llm: LLM) -> None:
    llm.generate(["hello"] * 3)
    assert len(llm._engine.added) == 3


def test_a_prompt_in_a_dict_is_that_prompt(llm: LLM) -> None:
    first, second = llm.generate(["hello", {"prompt": "hello"}])
    assert first.prompt == second.prompt == "hello"
    assert first.prompt_token_ids == second.prompt_token_ids


def test_params_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n) for n in (1, 2)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2]
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [1.5]}, r"prompt 1: prompt_token_ids\[0\] is 1\.5"),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\] is True"),
        ({"prompt_token_ids": [0, 512]}, r"prompt_token_ids\[1\] is 512, want 0 to 511"),
        ({"prompt_token_ids": [-(2**70)]}, r"prompt_token_ids\[0\] is -"),
        ({"prompt_token_ids": None}, "prompt_token_ids is None, want a list"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5, want a list"),
        ({"prompt_token_ids": {3: 4}}, r"prompt_token_ids is \{3: 4\}, want a list"),
        ({"prompt_token_ids": {3, 4}}, r"prompt_token_ids is \{3, 4\}, want a list"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids is '12', want a list"),
        ({"prompt_token_ids": b"ab"}, "prompt_token_ids is b'ab', want a list"),
        ({"prompt_token_ids": [[1, 2]]}, r"prompt_token_ids\[0\] is \[1, 2\], want an integer"),
        ({"prompt_token_ids": np.array([[1]])}, r"prompt_token_ids\[0\] is array\(\[1\]\)"),
        ({"prompt_token_ids": np.array(3)}, r"prompt_token_ids is array\(3\), want a list"),
        ({"prompt_token_ids": np.array([True])}, r"prompt_token_ids\[0\] is .*True"),
        ("a\ud800", "prompt is not valid Unicode at character 1"),
        ({"prompt": 5}, "prompt is 5, want a str"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "want a string"),
        (3, "prompt is 3"),
        (None, "prompt is None"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_runs(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["hello", prompt])
    assert not llm._running and not llm._engine.active


def test_empty_text_is_a_prompt_when_there_is_a_bos(llm: LLM, tokenizer_folder: Path) -> None:
    assert llm.generate("")[0].prompt_token_ids == [500]
    settings = tokenizer_folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('_token": true', '_token": false'))
    assert LLM().generate("")[0].prompt_token_ids == [500]
    assert LLM().generate("hello")[0].prompt_token_ids == [259]
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="prompt is empty"):
        LLM().generate("")


def test_max_tokens_0_and_none(llm: LLM) -> None:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=0))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    llm.generate("hello", SamplingParams(max_tokens=None))
    assert llm._engine.added[1].max_tokens == 510


def test_no_tokenizer(fake_engine: Fake, tokenizer_folder: Path) -> None:
    fake_engine.script = HELLO
    (tokenizer_folder / "tiktoken.model").unlink()
    llm = LLM()
    (output,) = llm.generate({"prompt_token_ids": [1, 2]})
    assert output.outputs[0].token_ids == HELLO and output.outputs[0].text == ""
    with pytest.raises(ValueError, match=r"has no tiktoken\.model"):
        llm.generate("hello")
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="a"))


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize("stride", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("world", "hello ", 2),
        ("o w", "hell", 2),
        ("!\nhe", "hello world", 5),
        (["zzz", "\n", "!"], "hello world", 3),
        (["llo", "hel"], "", 1),
        ("nothing", "hello world!\nhello", 5),
    ],
)
def test_stop_strings(
    fake_engine: Fake, stride: int, stop: Any, text: str, num_tokens: int
) -> None:
    """The result is the same however many tokens a round commits."""
    fake_engine.script, fake_engine.stride = HELLO, stride
    llm = LLM()
    (output,) = llm.generate("x", SamplingParams(stop=stop))
    completion = output.outputs[0]
    assert completion.text == text
    assert completion.token_ids == HELLO[:num_tokens]
    stopped = stop != "nothing"
    assert completion.finish_reason == ("stop" if stopped else "length")
    assert completion.stop_reason in (stop if stopped else [None])
    assert not llm._engine.active
    streamed = "".join(c.text for c in llm.stream("x", SamplingParams(stop=stop)))
    assert streamed == text


def test_stop_string_can_be_kept(llm: LLM) -> None:
    params = SamplingParams(stop="o w", include_stop_str_in_output=True)
    assert llm.generate("x", params)[0].outputs[0].text == "hello w"


def test_text_that_may_become_a_stop_string_is_held_back(llm: LLM) -> None:
    builder = TextBuilder(llm.get_tokenizer(), SamplingParams(stop=["worlds", "ox"]))
    builder.push(259)
    assert builder.take(False) == "hell"  # "o" may start "ox"
    builder.push(264)
    assert builder.take(False) == "o "
    assert builder.take(True) == "world"


@pytest.mark.parametrize("stride", [1, 3])
def test_stop_tokens(fake_engine: Fake, stride: int) -> None:
    """Kept as the last token, left out of the text unless asked for."""
    fake_engine.script, fake_engine.stride = HELLO, stride
    llm = LLM()
    for kept, text in ((False, "hello world"), (True, "hello world!")):
        params = SamplingParams(stop_token_ids=[33], include_stop_str_in_output=kept)
        completion = llm.generate("x", params)[0].outputs[0]
        assert completion.text == text and completion.token_ids == HELLO[:3]
        assert completion.finish_reason == "stop" and completion.stop_reason == 33


def test_end_of_text(fake_engine: Fake) -> None:
    fake_engine.script, fake_engine.eos = [259, 510, 264], 510
    llm = LLM()
    completion = llm.generate("x")[0].outputs[0]
    assert (completion.text, completion.token_ids) == ("hello", [259, 510])
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    completion = llm.generate("x", SamplingParams(ignore_eos=True))[0].outputs[0]
    assert completion.text == "hello world"
    shown = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    assert llm.generate("x", shown)[0].outputs[0].text == "hello<|im_end|> world"


def test_incomplete_character_at_the_end(fake_engine: Fake) -> None:
    fake_engine.script, fake_engine.stride = [259, 0xF0, 0x9F], 1
    llm = LLM()
    assert llm.generate("x")[0].outputs[0].text == "hello\ufffd"
    assert [c.text for c in llm.stream("x")][-3:] == ["hello", "", "\ufffd"]


# ---------------------------------------------------------------- streams and statistics


def test_stream(llm: LLM) -> None:
    stream = llm.stream("hello world, and more")
    chunks = list(stream)
    assert "".join(c.text for c in chunks) == "hello world!\nhello"
    assert [t for c in chunks for t in c.token_ids] == HELLO
    assert chunks[0].text == "" and chunks[0].step.num_prefilled == 4
    assert [c.finish_reason for c in chunks[-2:]] == [None, "length"]
    assert stream.output.outputs[0].token_ids == HELLO and stream.output.finished


def test_streams_and_generate_share_the_engine(llm: LLM) -> None:
    first, second = llm.stream("hello"), llm.stream("hello")
    starts = [next(first).token_ids, next(second).token_ids]
    (output,) = llm.generate("hello")
    assert output.outputs[0].token_ids == HELLO
    for start, stream in zip(starts, (first, second), strict=True):
        assert start + [t for c in stream for t in c.token_ids] == HELLO


def test_a_closed_stream_ends_its_request(llm: LLM) -> None:
    with llm.stream("hello") as stream:
        next(stream)
    assert not llm._engine.active and stream.output.outputs[0].finish_reason == "abort"
    dropped = llm.stream("hello")
    del dropped
    assert not llm._engine.active


def test_an_interrupted_generate_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"])
    assert not llm._running and llm._engine.aborted == [1, 2]


def test_logits_that_are_no_numbers_are_an_error(llm: LLM) -> None:
    llm._engine.no_numbers = 2
    with pytest.raises(RuntimeError, match="prompt 1: the model's logits are not all numbers"):
        llm.generate(["a", "b", "c"])
    assert not llm._running and not llm._engine.active and {1, 3} <= set(llm._engine.aborted)
    assert llm.generate("a")[0].outputs[0].token_ids == HELLO


def test_a_stream_gives_what_came_before_an_error(llm: LLM) -> None:
    llm._engine.no_numbers = 1
    stream, texts = llm.stream("a"), []
    with pytest.raises(RuntimeError, match="not all numbers after 3 tokens"):
        for chunk in stream:
            texts.append(chunk.text)
    assert "".join(texts) == "hello" and stream.output.outputs[0].finish_reason == "error"
    assert not llm._running


def test_statistics(llm: LLM) -> None:
    spec = llm.generate("hello")[0].spec
    assert spec.method == "ddtree" and spec.tree_budget == "auto"
    assert spec.target_forwards == 2 and spec.accept_length_histogram == {3: 1, 1: 1}
    assert spec.tokens_per_forward == 2.0
    assert spec.timings["verify_ms"] == 2.0 and spec.timings["prefill_ms"] > 0
    assert spec.tokens_per_second > 0
    plain = llm.generate("hello", speculative_config={"method": "none"})[0].spec
    assert plain.tree_budget is None and plain.accept_length_histogram == {1: 4}


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hello"}])
    assert output.prompt_token_ids[:2] == [500, 501]
    assert output.outputs[0].text == "hello world!\nhello"
    both = llm.chat([[{"role": "user", "content": c}] for c in "ab"])
    assert len(both) == 2
    with pytest.raises(ValueError, match="messages"):
        llm.chat([])


def test_chat_arguments_are_checked(llm: LLM) -> None:
    messages = [{"role": "user", "content": "x"}]
    for wrong in (None, 5, "hello", {"role": "user"}):
        with pytest.raises(ValueError, match="messages is"):
            llm.chat(wrong)  # type: ignore[arg-type]
    for options, message in (
        ({"chat_template_kwargs": 5}, "chat_template_kwargs is 5"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools"),
        ({"tools": 5}, "tools is 5"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 5, b"ab", {"a", "b"}])
def test_prompts_must_be_a_list(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match="prompts is "):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [5, "x", {"max_tokens": 3}, [None, 5], False])
def test_sampling_params_must_be_of_their_class(llm: LLM, params: Any) -> None:
    prompts = ["a", "b"] if isinstance(params, list) else ["a"]
    with pytest.raises(ValueError, match="sampling_params is "):
        llm.generate(prompts, params)
    assert not llm._engine.active


def test_params_changed_later_are_checked(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -0.7
    with pytest.raises(ValueError, match=r"temperature is -0\.7"):
        llm.generate("x", params)


def test_a_closed_llm_says_so(llm: LLM) -> None:
    stream = llm.stream("hello")
    llm.close()
    llm.close()
    assert list(stream) == []
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.stream("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.logits([1]),
        lambda: llm.stats(),
    ):
        with pytest.raises(RuntimeError, match="the LLM is closed"):
            call()


def test_progress_and_context_manager(fake_engine: Fake) -> None:
    seen: list[tuple[int, int]] = []
    with LLM(progress=lambda done, total: seen.append((done, total))) as llm:
        assert isinstance(llm.get_tokenizer(), Tokenizer)
        assert llm.stats()["isa"] == "fake"
    assert seen == [(1, 2), (2, 2)]
    assert not hasattr(llm, "_engine")
