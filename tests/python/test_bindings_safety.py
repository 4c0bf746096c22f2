"""The compiled module against its users: bad arguments, signals, finalisers, forks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

F32, I32 = np.float32, np.int32
HUGE = 10**5000  # too long for Python to print


def ones(*shape: int) -> Any:
    return np.ones(shape, F32)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, I32)


# Good arguments of every op, by name.
OPS: dict[str, dict[str, Any]] = {
    "build_tree": {"logprobs": ones(2, 3), "token_ids": zeros(2, 3), "budget": 4},
    "accept_tree": {
        "tokens": np.array([-1, 5], I32),
        "first_child": np.array([1, -1], I32),
        "next_sibling": np.array([-1, -1], I32),
        "target_tokens": np.array([5, 6], I32),
    },
    "op_rms_norm": {"x": ones(2, 3), "weight": ones(3), "eps": 1e-6},
    "op_linear": {"x": ones(2, 4), "weight": ones(3, 4), "scale": None},
    "op_topk_logprobs": {"logits": ones(2, 4), "k": 2, "temperature": 1.0},
    "op_argmax": {"logits": ones(2, 4)},
    "op_silu_mul": {"gate_up": ones(2, 4)},
    "op_moe_route": {
        "logits": ones(2, 4), "bias": ones(4), "top_k": 2, "n_group": 2, "topk_group": 1,
        "norm_topk_prob": True, "scale": 1.0,
    },
    "op_moe_experts": {
        "x": ones(2, 3), "ids": zeros(2, 1), "weights": ones(2, 1), "gate": ones(1, 5, 3),
        "up": ones(1, 5, 3), "down": ones(1, 3, 5),
    },
    "op_mla_attention": {
        "q": ones(2, 3, 7), "kv": ones(3, 9), "w_uk": ones(3, 5, 3), "norm_weight": ones(5),
        "eps": 1e-6, "cos_sin": ones(16, 4), "interleaved": True,
        "parents": np.array([-1, 0], I32), "prefix_len": 1, "scale": 1.0,
    },
    "op_gqa_attention": {
        "q": ones(2, 4, 6), "k": ones(3, 2, 6), "v": ones(3, 2, 6), "q_norm": ones(6),
        "k_norm": ones(6), "eps": 1e-6, "cos_sin": ones(16, 6), "context_len": 1, "causal": True,
        "window": 0, "scale": 1.0,
    },
}  # fmt: skip

ARGUMENTS = [(op, name) for op, arguments in OPS.items() for name in arguments]


def wrong_values(name: str, good: Any) -> list[Any]:
    """What no argument of this one's kind may be."""
    wrong = [None, "x", object(), HUGE, -HUGE, {}, [[1], [2, 3]]]
    if isinstance(good, np.ndarray):
        wrong += [1.0, good[0], good[None], good.astype(complex), good.astype(object), good > 0]
        wrong += [good.astype(str), good.astype("M8[s]"), np.zeros((0,) * good.ndim, good.dtype)]
        if good.dtype == I32:
            wide = good.astype(np.int64)
            wrong += [good + 0.5, np.full(good.shape, np.nan), wide + 2**40, wide - 2**40]
            wrong += [np.full(good.shape, 2**64 - 1, np.uint64), np.full(good.shape, 2**31, "u4")]
        else:
            wrong += [good.astype(I32), np.full(good.shape, 1e300), good.astype(np.longdouble)]
        # Any number of rows is right for these, none too.
        if name in ("logprobs", "token_ids", "logits", "x", "gate_up", "tokens"):
            wrong = [w for w in wrong if not (isinstance(w, np.ndarray) and w.dtype == good.dtype)]
    elif isinstance(good, bool):
        wrong += [1, 0.0]
    elif isinstance(good, int):
        wrong += [1.5, True, -1, 2**63, -(2**63), np.array([1, 2])]
        wrong += [] if name == "window" else [2**63 - 1]
    elif isinstance(good, float):
        wrong += [True, np.nan, np.inf, -np.inf, 1e300, 1j, np.ones(2)]
        if name != "scale":
            wrong += [0.0, -1.0, 1e-300]
    else:  # the scale of op_linear, whose weight is not int4
        wrong = [np.ones((3, 1), np.uint16)]
    return wrong


@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_a_wrong_argument_of_an_op_is_a_value_error_that_names_it(op: str, name: str) -> None:
    call, good = getattr(_core, op), OPS[op]
    call(**good)
    for value in wrong_values(name, good[name]):
        with pytest.raises(ValueError, match=name):
            call(**{**good, name: value})


@pytest.mark.parametrize(("op", "name"), [a for a in ARGUMENTS if type(OPS[a[0]][a[1]]) is not int])
def test_arrays_of_any_layout_give_the_same_result(op: str, name: str) -> None:
    call, good = getattr(_core, op), OPS[op]
    value = good[name]
    if not isinstance(value, np.ndarray):
        return
    rng = np.random.default_rng(1)
    if value.dtype == F32:
        value = rng.standard_normal(value.shape).astype(F32)
    if name == "logprobs":
        value = -np.sort(-value, axis=1)
    unaligned = np.frombuffer(b"\0" + value.tobytes(), np.uint8)[1:].view(value.dtype)
    unaligned = unaligned.reshape(value.shape)
    assert not unaligned.flags.aligned
    wide = value.astype(np.int64 if value.dtype == I32 else np.float64)
    others = [unaligned, wide, value.tolist(), value.astype(value.dtype.newbyteorder())]
    others.append(np.repeat(value, 2, axis=-1)[..., ::2])
    if op == "op_linear" and name == "weight":
        others = [unaligned]  # its type says what it holds
    if value.dtype == I32:
        others.append(value.astype(np.int8))
    want = call(**{**good, name: value})
    for other in others:
        got = call(**{**good, name: other})
        np.testing.assert_equal(got, want)


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        *(
            (op, {name: np.ones([n + 1 for n in OPS[op][name].shape], F32)}, "want|rows")
            for op, name in ARGUMENTS
            if getattr(OPS[op][name], "dtype", None) == F32 and len(OPS[op]) > 1
            if (op, name) not in (("op_topk_logprobs", "logits"), ("op_linear", "x"))
        ),
        ("op_gqa_attention", {"q": ones(2, 0, 6)}, "q is .*0"),
        ("op_gqa_attention", {"k": ones(3, 0, 6), "v": ones(3, 0, 6)}, "k is .*0"),
        ("op_gqa_attention", {"q": ones(2, 3, 6)}, "q has 3 heads; want a multiple of k's 2"),
        ("op_gqa_attention", {"context_len": 2**63 - 1}, f"context_len is {2**63 - 1}"),
        ("op_gqa_attention", {"cos_sin": ones(2, 6)}, "cos_sin is .*more than 2 rows"),
        ("op_mla_attention", {"q": ones(2, 0, 7), "w_uk": ones(0, 5, 3)}, "q is .*0"),
        ("op_mla_attention", {"prefix_len": 2**63 - 1}, f"prefix_len is {2**63 - 1}"),
        ("op_mla_attention", {"w_uk": ones(3, 5, 8)}, "w_uk is"),
        ("op_mla_attention", {"cos_sin": ones(2, 4)}, "cos_sin is .*more than 2 rows of 4"),
        ("op_mla_attention", {"parents": np.array([-1, 1], I32)}, r"parents\[1\] is 1"),
        (
            "op_mla_attention",
            {"q": ones(4097, 3, 7), "kv": ones(4098, 9), "parents": np.arange(-1, 4096)},
            "q has 4097 rows; want at most 4096",
        ),
        ("op_rms_norm", {"weight": ones(2)}, r"weight is f32\[2\]; want f32\[3\]"),
        ("op_rms_norm", {"x": ones(2, 0), "weight": ones(0)}, "weight is"),
        ("op_linear", {"x": ones(2, 32), "weight": np.ones((3, 4), I32)}, "scale is missing"),
        ("op_linear", {"x": ones(2, 8), "weight": np.ones((3, 1), I32)}, "weight holds .*32"),
        (
            "op_linear",
            {"x": ones(2, 32), "weight": np.ones((3, 4), I32), "scale": np.full((3, 1), 1.5)},
            "scale has dtype float64",
        ),
        ("op_linear", {"weight": np.asfortranarray(ones(3, 4))}, "weight is not C-contiguous"),
        ("op_silu_mul", {"gate_up": ones(2, 3)}, "gate_up has rows of 3 values"),
        ("op_topk_logprobs", {"temperature": 1e-45}, "temperature is 1.*e-45"),
        ("op_moe_experts", {"gate": ones(1, 0, 3)}, "gate is"),
        ("accept_tree", {"first_child": np.array([2, -1], I32)}, r"first_child\[0\] is 2"),
        ("accept_tree", {"next_sibling": np.array([-1, 99], I32)}, r"next_sibling\[1\] is 99"),
    ],
)
def test_arguments_that_do_not_fit_each_other(
    op: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(_core, op)(**{**OPS[op], **change})


INTEGERS = [None, "4", 1.0, True, 2**63, -(2**63) - 1, HUGE]
NUMBERS = [None, "1", True, 1j, HUGE, np.True_, np.complex64(1 + 2j)]
TEXTS = [3, b"cpu", "a\0b", "\udc80", True]
LISTS = [3, "12", b"12", [1.0], [True], [None], [2**63], [HUGE], [[1]], np.ones((1, 2), int)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Any:
    return _core.Engine(str(tiny_model), str(tiny_model / "drafter"), num_threads=2)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", [*TEXTS, None]),
        ("drafter", TEXTS),
        ("device", [*TEXTS, None]),
        *((n, INTEGERS) for n in ("num_threads", "max_model_len", "max_num_seqs")),
        ("num_threads", [2**31, 2**32 + 1]),
        ("prefill_chunk_size", INTEGERS),
        ("latent_rms_norm_eps", NUMBERS),
        ("progress", [3, "x"]),
    ],
)
def test_a_wrong_option_of_the_engine_is_named(
    tiny_model: Path, name: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is "):
            _core.Engine(**{"model": str(tiny_model), name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop_token_ids", [*LISTS, None]),
        ("ignore_eos", [None, 1, "yes"]),
        ("method", [*TEXTS, None]),
        *((n, NUMBERS) for n in ("draft_temperature", "temperature", "top_p", "min_p")),
        *((n, INTEGERS) for n in ("max_tokens", "tree_budget", "tree_topk", "top_k", "seed")),
    ],
)
def test_a_wrong_option_of_a_request_is_named(name: str, values: list[Any]) -> None:
    options = _core.RequestOptions()
    before = getattr(options, name)
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}(\[0\])? is "):
            _core.RequestOptions(**{name: value})
        with pytest.raises(ValueError, match=rf"^{name}(\[0\])? is "):
            setattr(options, name, value)
    assert getattr(options, name) == before


def test_wrong_arguments_of_the_methods_are_named(engine: Any, tmp_path: Path) -> None:
    options = _core.RequestOptions()
    calls: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
        ("prompt_token_ids", lambda v: engine.add_request(v, options), [*LISTS, None]),
        ("prompt_token_ids", lambda v: engine.generate(v, options), [*LISTS, None]),
        ("options", lambda v: engine.add_request([1], v), [None, {}, 3]),
        ("request_id", engine.abort, INTEGERS),
        ("token_ids", engine.logits, [*LISTS, None]),
        ("prefix_token_ids", lambda v: engine.tree_logits(v, [1], [-1]), [*LISTS, None]),
        ("tokens", lambda v: engine.tree_logits([], v, [-1]), [*LISTS, None]),
        ("parents", lambda v: engine.tree_logits([], [1], v), [*LISTS, None]),
        ("folder", _core.inspect_checkpoint, [*TEXTS, None]),
        ("device", _core.bench_ops, [*TEXTS, None]),
        ("num_threads", _core.measure_cpu, INTEGERS),
        ("cache_bytes", lambda v: _core.measure_cpu(1, v), INTEGERS),
    ]
    for name, call, values in calls:
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name}(\[0\])? is "):
                call(value)
    assert not engine.has_unfinished()
    ids = np.array([1, 2, 3])
    assert engine.logits(ids).tobytes() == engine.logits((1, 2, 3)).tobytes()


def test_an_error_of_the_value_itself_is_told(engine: Any) -> None:
    class Breaks:
        def __index__(self) -> int:
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        engine.abort(Breaks())
    with pytest.raises(KeyError, match="inside"):
        engine.add_request([1, Breaks()], _core.RequestOptions())


@pytest.mark.parametrize("name", ["Engine", "RequestOptions", "StepOutput", "Tree"])
def test_an_object_that_was_never_made_is_refused(engine: Any, name: str) -> None:
    kind = getattr(_core, name)
    empty = kind.__new__(kind)
    takes = {"generate": 2, "add_request": 2, "tree_logits": 3, "logits": 1, "abort": 1}
    for member in (m for m in vars(kind) if not m.startswith("_")):
        with pytest.raises(TypeError):
            value = getattr(empty, member)
            value(*[[1]] * takes.get(member, 0))
    if name == "RequestOptions":
        with pytest.raises(TypeError):
            empty.max_tokens = 3
        with pytest.raises(ValueError, match=r"^options is "):
            engine.generate([1], empty)


# ---------------------------------------------------------------- what may hang or crash, apart

PREAMBLE = """
import gc, os, signal, sys, threading, time
import numpy as np
from kdtree_engine import LLM, SamplingParams, _core
folder = sys.argv[1]
def engine(**options):
    return _core.Engine(folder, folder + "/drafter", num_threads=2, **options)
def options(n=300, **more):
    return _core.RequestOptions(max_tokens=n, ignore_eos=True, method="none", **more)
"""


def run_apart(folder: Path, script: str, prints: str = "") -> None:
    """Runs the script in a process of its own, which must end well, in time, and print this."""
    command = [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    assert done.stdout == prints


def test_a_signal_handler_may_look_at_the_engine_during_generate(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
e = engine()
before = e.generate([1, 2, 3], options(40))
inside, refused, other = [], [], None
def handler(*_):
    stats, config = e.stats(), e.config()
    if other is None or stats["active_requests"] == 0:
        return
    for call in (e.step, lambda: e.generate([1], options()), lambda: e.logits([1]),
                 lambda: e.add_request([1], options())):
        try:
            call()
        except RuntimeError as error:
            refused.append(str(error))
        else:
            return  # between two calls of the loop below
    assert e.has_unfinished() and config == e.config()
    assert e.abort(other)
    inside.append(stats)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
while not inside:
    other = e.add_request([4, 5], options(400))
    e.generate([1, 2, 3], options(400))
    e.abort(other)
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(refused) >= 4 and all("in a call of this thread" in r for r in refused), refused
assert inside[0]["active_requests"] >= 1
assert not e.has_unfinished() and e.stats()["active_requests"] == 0
tokens = [t for o in before for t in o.token_ids]
assert [t for o in e.generate([1, 2, 3], options(40)) for t in o.token_ids] == tokens
""",
    )


def test_an_array_may_be_made_while_another_is_made_for_the_first_time(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
from numpy.lib import NumpyVersion
make, ones = NumpyVersion.__init__, np.ones((1, 2), np.float32)
def with_a_signal(*arguments):  # a handler may run anywhere in Python
    NumpyVersion.__init__ = make
    _core.op_argmax(ones)
    make(*arguments)
NumpyVersion.__init__ = with_a_signal
assert _core.op_argmax(ones) == 0
""",
    )


def test_an_exception_of_a_signal_handler_ends_the_request(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
e = engine()
def handler(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    while True:
        e.generate([1, 2, 3], options(400))
except KeyboardInterrupt:
    pass
assert not e.has_unfinished()
assert len(e.generate([1, 2, 3], options(5))) == 5
""",
    )


def test_a_signal_handler_cannot_mix_up_the_requests_of_an_llm(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
llm = LLM(folder, num_threads=2)
prompt, params = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=60, ignore_eos=True)
def tokens():
    return llm.generate(prompt, params)[0].outputs[0].token_ids
want = tokens()
refused, mixed, started = 0, 0, 0
def handler(*_):
    global refused, started
    try:
        assert llm.generate({"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=3))[0].finished
        started += 1
    except RuntimeError as error:
        assert "the LLM is in a call" in str(error), error
        refused += 1
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005)
for _ in range(40):
    mixed += tokens() != want
signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert refused > 0 and mixed == 0, (refused, mixed, started)
assert tokens() == want and not llm.stats()["active_requests"]
""",
    )


def test_finalisers_may_abort_wherever_they_run(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
llm = LLM(folder, num_threads=2)
e = llm._engine
class Loop:
    def __init__(self, stream):
        self.me, self.stream = self, stream
    def __del__(self):
        self.stream.close()
gc.set_threshold(1, 1, 1)
for i in range(60):
    Loop(llm.stream("hello", SamplingParams(max_tokens=100)))
    e.stats(), e.config(), e.logits([1, 2]), e.step()
gc.collect()
assert e.stats()["active_requests"] == e.stats()["waiting_requests"] == 0
""",
    )


def test_an_abort_from_another_thread_does_not_wait_for_a_call(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
e = engine()
for _ in range(100):
    other = e.add_request([4, 5], options(400))
    thread = threading.Thread(target=lambda: e.generate([1, 2, 3], options(300)))
    thread.start()
    time.sleep(0.005)
    assert e.abort(other)
    busy = thread.is_alive()
    thread.join()
    assert not e.has_unfinished()
    if busy:
        break
assert busy
""",
    )


def test_a_forked_process_may_drop_the_engine_but_not_use_it(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
e = engine()
prompt = [1, 2, 3]
e.generate(prompt, options(20))
running = e.add_request([4], options(50))
x, w = np.ones((64, 256), np.float32), np.ones((512, 256), np.float32)
want = _core.op_linear(x, w)  # large enough for all threads
def child():
    for call in (lambda: e.generate(prompt, options()), e.step, e.stats, e.has_unfinished,
                 lambda: e.add_request(prompt, options()), lambda: e.logits(prompt)):
        try:
            call()
        except RuntimeError as error:
            assert "forked process" in str(error), error
        else:
            raise AssertionError(call)
    assert e.abort(running) is False
    assert (_core.op_linear(x, w) == want).all()
    globals().pop("e")
    gc.collect()
    own = engine()
    assert own.generate(prompt, options(3))
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert len(e.generate(prompt, options(20))) == 20
""",
    )
