"""Prepares the process for the server, before imports that take seconds. web_server.py is next."""

import os
import signal
import sys


def open_streams() -> None:
    """Open the standard streams that are closed, in order.

    Otherwise other files would get their numbers, and the log would be written to these.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    open_streams()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Until the server runs. An exception would be lost where Python ignores exceptions, such as
        # in the callbacks of imports.
        signal.signal(number, lambda *_: os._exit(0))
    from nanovllm.server.web_server import main

    main()


if __name__ == "__main__":
    main()
