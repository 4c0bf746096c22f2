"""`python -m kdtree_engine` is the command `kdtree`."""

import os
import signal


def main() -> None:
    """Entry point of the command, which Ctrl-C may end while its modules are still imported."""
    at_once = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if at_once:  # an exception could be taken for a fault of the module
        signal.signal(signal.SIGINT, _interrupted)
    from kdtree_engine import cli

    if at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _interrupted(*_: object) -> None:
    try:
        os.write(2, b"\nkdtree: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
