"""Prepares the process for the server, before imports that take seconds. web_server.py is next."""

import os
import signal


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        # Until the server runs. An exception would be lost where Python ignores exceptions, such as
        # in the callbacks of imports.
        signal.signal(number, lambda *_: os._exit(0))
    from nanovllm.server.web_server import main

    main()


if __name__ == "__main__":
    main()
