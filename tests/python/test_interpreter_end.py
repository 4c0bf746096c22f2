"""Threads in the compiled module when the interpreter ends, each time in a process of its own."""

from pathlib import Path

import pytest

from test_bindings_safety import run_apart

CALLS = {
    "step": "e.step()",
    "generate": "e.generate([1, 2, 3], options(20))",
    "logits": "e.logits([1] * 64)",
    "the constructor": "engine(progress=lambda done, total: sum(range(1000)))",
    "measure_cpu": "_core.measure_cpu(1, 1 << 16)",
}
# Runs `call` when Python clears its modules, which is after it has begun to end threads.
AT_THE_END = """
import types
class Last:
    def __init__(self, call):
        self.call = call
    def __del__(self):
        self.call()
sys.modules["last"] = types.ModuleType("last")
def at_the_end(call):
    sys.modules["last"].last = Last(call)
"""


@pytest.mark.parametrize("name", CALLS)
def test_daemon_threads_may_be_in_a_call_when_the_interpreter_ends(
    tiny_model: Path, name: str
) -> None:
    script = f"""
e = engine()
entered = threading.Semaphore(0)
def work():
    while True:
        entered.release()
        {CALLS[name]}
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(3):
    entered.acquire()
time.sleep(0.2)
at_the_end(lambda sleep=time.sleep, write=os.write: (sleep(0.5),
                                                     write(1, b"ended")))
"""
    run_apart(tiny_model, AT_THE_END + script, prints="ended")


def test_the_last_thread_can_use_the_engine_while_others_are_stopped(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        AT_THE_END
        + """
import atexit
e = engine()
def use(e=e, options=options, write=os.write):
    e.abort(e.add_request([1], options()))
    assert e.stats() and len(e.generate([1, 2, 3], options(5))) == 5
    write(1, b"used")
atexit.register(use)  # called before the engine's own, which is older
at_the_end(use)
def work():
    while True:
        e.generate([1, 2, 3], options(200))
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
""",
        prints="usedused",
    )


def test_a_forked_process_ends_though_threads_of_its_parent_were_asking(tiny_model: Path) -> None:
    run_apart(
        tiny_model,
        """
e = engine()
def work():
    while True:
        e.step()
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
""",
    )
