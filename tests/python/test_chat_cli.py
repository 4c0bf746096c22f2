"""`kdtree chat`: over standard input, and in a terminal of its own (a pty)."""

import io
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_core
from kdtree_engine import cli_chat

Fake = type[fake_core.Engine]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(scripted: Fake, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `kdtree chat` with a text as standard input."""

    def call(text: str | bytes, *arguments: str) -> tuple[int, str, str]:
        raw = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        return run("chat", *arguments)

    return call


ANSWER = "hello world!\nhello\n"


def prompts(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the prompts that the engine is given from now on."""
    from kdtree_engine.llm import default_model
    from kdtree_engine.tokenizer import Tokenizer

    seen: list[str] = []
    add = engine.add_request

    def watched(self: Any, ids: list[int], options: Any) -> int:
        seen.append(Tokenizer(default_model()).decode(ids))
        return add(self, ids, options)

    monkeypatch.setattr(engine, "add_request", watched)
    return seen


def test_each_line_is_a_message(say: Run, scripted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(scripted, monkeypatch)
    status, out, err = say("hello\nworld\n")
    assert (status, out) == (0, ANSWER * 2) and "error" not in err
    user, assistant = "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>"
    first = f"[BOS]{user}hello<|im_end|>{assistant}"
    assert seen == [first, f"{first}hello world!\nhello<|im_end|>{user}world<|im_end|>{assistant}"]


def test_a_conversation_can_be_reset(
    say: Run, scripted: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prompts(scripted, monkeypatch)
    assert say("hello\n/reset\nhello", "--system", "Be short.")[0] == 0
    assert seen[0] == seen[1] and "system<|im_middle|>Be short.<|im_end|>" in seen[0]


def test_messages_of_many_lines(say: Run, scripted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(scripted, monkeypatch)
    say('one \\\ntwo\n"""\nthree\n\nfour\n"""\n"""five"""\n\n  \n"""six\n//etc is a folder\n')
    said = [
        p.rpartition("<|im_user|>user<|im_middle|>")[2].partition("<|im_end|>")[0] for p in seen
    ]
    assert said == ["one \ntwo", "three\n\nfour", "five", "six\n//etc is a folder"]
    seen.clear()
    say("//etc\nlast \\")
    assert "<|im_middle|>/etc<|im_end|>" in seen[0] and "<|im_middle|>last <|im_end|>" in seen[1]


def test_commands(say: Run, scripted: Fake) -> None:
    out = say("hello\n/stats\n/tree\n/help\n/quit\nnever")[1]
    assert out.startswith(ANSWER) and out.count(ANSWER) == 1
    assert "[5 tokens (length), ddtree auto, " in out
    assert "[all answers: 5 tokens in 2 target forwards, 2.00 tokens per forward" in out
    assert "root, the last token so far" in out and "bonus, the target's own" in out
    assert cli_chat.HELP in out
    noise = "probabilities given part of the noise of the draws"
    assert noise not in out and noise in say("hello\n/tree\n", "-T", "0.7")[1]


def test_the_budget_of_the_next_answers(
    say: Run, scripted: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, int, int]] = []
    add = scripted.add_request

    def watched(self: Any, ids: list[int], options: Any) -> int:
        used.append((options.method, options.tree_budget, options.tree_topk))
        return add(self, ids, options)

    monkeypatch.setattr(scripted, "add_request", watched)
    text = "x\n/budget\n/budget 8\nx\n/budget none\nx\n/budget auto\nx\n"
    out = say(text, "--tree-topk", "32")[1]
    assert used == [("ddtree", 0, 32), ("ddtree", 8, 8), ("none", 0, 0), ("ddtree", 0, 32)]
    assert [line for line in out.splitlines() if line.startswith("[")] == [
        "[auto draft nodes a round]", "[8 draft nodes a round]", "[none]",
        "[auto draft nodes a round]",
    ]  # fmt: skip


def test_answers_draw_with_seeds_of_their_own(
    say: Run, scripted: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    add = scripted.add_request

    def watched(self: Any, ids: list[int], options: Any) -> int:
        seeds.append(options.seed)
        return add(self, ids, options)

    monkeypatch.setattr(scripted, "add_request", watched)
    out = say("x\n/stats\nx\n", "--temperature", "0.7")[1]
    assert seeds[0] != seeds[1] and f", seed {seeds[0]}, accept lengths" in out
    seeds.clear()
    say("x\n/reset\nx\n", "--temperature", "0.7", "--seed", "3")
    assert seeds == [3, 3]


def test_variables_of_the_template(say: Run, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text(
        "{{ raise_exception('thinking is ' ~ thinking) }}"
    )
    status, _, err = say("x", "--chat-template-kwargs", '{"thinking": false}')
    assert status == 1 and "thinking is False" in err


THOUGHT = [*b"hm", 256 + 23, *b"Wait.", 256 + 13, *b"now:0", 256 + 14, *b"{}", 256 + 15]
THOUGHT += [256 + 13, *b"bad", 256 + 15]


def test_reasoning_and_calls_are_not_the_answer(
    say: Run, scripted: Fake, kimi_folder: Path
) -> None:
    scripted.script = THOUGHT
    status, out, err = say("x")
    assert (status, out) == (0, "Wait.\n")
    assert err.splitlines()[-3:] == [
        "hm",
        "[calls now {}]",
        "[a call that cannot be made, as the call has no arguments: bad]",
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "status", "message"),
    [
        ("/nope", [], 1, "there is no command '/nope': /help lists them"),
        ("/reset now", [], 1, "there is no command '/reset now'"),
        ("/stats", [], 1, "there was no answer yet"),
        ("/tree", [], 1, "no round had a tree yet"),
        ("/budget 0", [], 2, "/budget is '0', want 1 to 256 or auto, or none"),
        (b"a\xff", [], 2, "standard input is not UTF-8"),
        ("x", ["--chat-template-kwargs", "{"], 2, "--chat-template-kwargs is no JSON"),
        ("x", ["--chat-template-kwargs", "1"], 2, "--chat-template-kwargs is '1', want a JSON"),
        ("x", ["--max-tokens", "-1"], 2, "--max-tokens is -1"),
        ("x", ["--temperature", "-1"], 2, "--temperature is -1.0, want 0 or 0.001 to 1000"),
        ("x", ["--top-p", "0.5"], 2, "--top-p has no effect on greedy decoding"),
    ],
)
def test_failures_end_it_with_one_line(
    say: Run, text: str | bytes, arguments: list[str], status: int, message: str
) -> None:
    got, out, err = say(text, *arguments)
    assert got == status and out == ""
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("kdtree: error: ")


def test_a_closed_standard_input(say: Run, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in run("chat")[2]


# ---------------------------------------------------------------- in a terminal


class Terminal:
    """A child process in a terminal of its own, and what it has written."""

    def __init__(self, main: Callable[[], None]) -> None:
        self.seen = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            status = 70
            try:
                sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
                sys.stderr = open(2, "w")  # noqa: SIM115
                signal.signal(signal.SIGINT, signal.default_int_handler)
                main()
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                os._exit(status)

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def expect(self, text: str, seconds: float = 30) -> str:
        """Reads until `text` came; gives what came up to its end."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            if not select.select([self._fd], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} in {self.seen!r}")
            try:
                self.seen += os.read(self._fd, 4096).decode("utf-8", "replace")
            except OSError:
                raise AssertionError(f"it ended without {text!r} after {self.seen!r}") from None
        at = self.seen.index(text) + len(text)
        before, self.seen = self.seen[:at], self.seen[at:]
        return before

    def status(self, seconds: float = 30) -> int:
        end = time.monotonic() + seconds
        while True:  # a child that still writes would wait for a reader
            if not select.select([self._fd], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError("it did not end")
            try:
                if not os.read(self._fd, 4096):
                    break
            except OSError:
                break
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return status

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(scripted: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """`kdtree chat`, answering slowly where the question has the letter z."""
    from kdtree_engine.cli import main

    monkeypatch.setenv("TERM", "xterm")
    step = scripted.step

    def slow(self: Any) -> Any:
        if any(ord("z") in request["ids"] for request in self.active.values()):
            time.sleep(0.2)
            for request in self.active.values():
                request["left"] = [259] * 500
        return step(self)

    monkeypatch.setattr(scripted, "step", slow)
    child = Terminal(lambda: main(["chat"]))
    yield child
    child.close()


def test_in_a_terminal(terminal: Terminal) -> None:
    terminal.expect(": /help lists the commands, Ctrl-D leaves")
    terminal.expect(">>> ")
    terminal.send("hello\n")
    assert "hello world!\r\nhello\r\n" in terminal.expect(">>> ")
    terminal.send("/tree\n")
    assert "root, the last token so far" in terminal.expect(">>> ")
    terminal.send("/nope\n")
    assert "error: there is no command '/nope'" in terminal.expect(">>> ")
    terminal.send('"""\n')
    terminal.expect("... ")
    terminal.send("x\n")
    terminal.expect("... ")
    terminal.send('y"""\n')
    terminal.expect("hello world!")
    terminal.expect(">>> ")
    terminal.send("\x04")
    assert terminal.status() == 0


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(terminal: Terminal) -> None:
    terminal.expect(">>> ")
    terminal.send("z\n")
    terminal.expect("hellohello")
    terminal.send("\x03")
    assert "[stopped]" in terminal.expect(">>> ")
    terminal.send("/stats\n")
    assert "(abort), ddtree auto" in terminal.expect(">>> ")
    terminal.send("unfinished")
    terminal.expect("unfinished")
    time.sleep(0.2)  # readline notices a signal only once it waits again
    terminal.send("\x03")
    terminal.expect("(Ctrl-D or /quit leaves)")
    terminal.expect(">>> ")
    terminal.send("/reset\n")
    terminal.expect(">>> ")
    terminal.send("hello\n")
    assert "hello world!\r\nhello\r\n" in terminal.expect(">>> ")
    terminal.send("/quit\n")
    assert terminal.status() == 0


def test_reasoning_is_dimmed(scripted: Fake, kimi_folder: Path) -> None:
    from kdtree_engine.cli import main

    scripted.script = THOUGHT
    child = Terminal(lambda: main(["chat"]))
    try:
        child.expect(">>> ")
        child.send("x\n")
        shown = child.expect("[a call that cannot be made")
        assert "\x1b[2mhm\r\n\x1b[0mWait.\r\n[calls now {}]\r\n" in shown
        child.expect(">>> ")
        child.send("\x04")
        assert child.status() == 0
    finally:
        child.close()


def test_lines_can_be_recalled(terminal: Terminal) -> None:
    pytest.importorskip("readline")
    terminal.expect(">>> ")
    terminal.send("/nope\n")
    terminal.expect("error: there is no command")
    terminal.expect(">>> ")
    terminal.send("\x10\n")  # Ctrl-P, the line before
    terminal.expect("error: there is no command")
    terminal.expect(">>> ")
    terminal.send("/quit\n")
    assert terminal.status() == 0
