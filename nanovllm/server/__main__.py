"""Serve OpenAI's API: python -m nanovllm.server MODEL [--port 8000] [engine options].

MODEL is a checkpoint directory or a Hub id, and defaults to the demo model. All options of the
engine are options here, such as --max-model-len 2048.
"""

import argparse
import asyncio
import ipaddress
import signal
import socket
import sys
from dataclasses import fields
from types import FrameType
from typing import Any, get_args, get_type_hints

import uvicorn

from nanovllm import DEMO_MODEL, LLM
from nanovllm.config import Config
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.openai_api import Api
from nanovllm.server.playground import HOSTS, Playground

SHUTDOWN = "the server is shutting down"
GRACE = 5  # seconds for clients that do not read


class Server(uvicorn.Server):
    """Stops the engine, and with it all streams, before it waits for clients.

    It sleeps until a signal or a failure of the engine, where uvicorn looks ten times a second.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineThread, greeting: str) -> None:
        """Print `greeting` when clients can connect."""
        super().__init__(config)
        self.engine = engine
        self.greeting = greeting

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.exit_requested = asyncio.Event()
        self.engine.start_on(self.loop, on_failure=self.exit_requested.set)
        await super().startup(sockets)
        print(self.greeting, file=sys.stderr, flush=True)

    async def main_loop(self) -> None:
        await self.exit_requested.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.loop.call_soon_threadsafe(self.exit_requested.set)

    async def shutdown(self, sockets: Any = None) -> None:
        self.engine.stop(SHUTDOWN)
        await super().shutdown(sockets)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help="default: the demo model")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0 chooses a free port (default: 8000)")
    add("--api-key", metavar="KEY", help="clients must send it as a bearer token")
    add(
        "--playground",
        action="store_true",
        help="serve a page that shows and controls every step",
    )
    add_engine_options(
        parser.add_argument_group("engine options, see help(nanovllm.config.Config)")
    )
    return parser


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Add an option for each field of Config. The engine checks their values."""
    hints = get_type_hints(Config)
    for field in fields(Config)[1:]:
        flag = "--" + field.name.replace("_", "-")
        kinds = {hints[field.name], *get_args(hints[field.name])}
        if bool in kinds:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=argparse.SUPPRESS)
            continue
        kind: type = str
        for number in (float, int):
            if number in kinds:
                kind = number
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    names = [field.name for field in fields(Config)[1:]]
    options = {name: value for name, value in vars(args).items() if name in names}
    if args.playground and (not is_loopback(args.host) or args.api_key or "trace" in options):
        parser.error(
            "--playground shows every prompt to everyone who opens the page, and records every"
            " step: use a loopback --host, and neither --api-key nor --trace"
        )
    if not is_loopback(args.host) and args.api_key is None:
        message = f"warning: --host {args.host} lets everyone in the network use this server"
        print(f"nanovllm: {message}: set --api-key", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises the signal again when it has shut down. The exit status is then 0.
        signal.signal(number, lambda *_: sys.exit(0))
    playground: Playground | None = None
    try:
        if args.playground:
            playground = Playground(args.model, options)
        engine = playground or EngineThread(LLM(args.model, **options))
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    name = "demo_model" if args.model == DEMO_MODEL else args.model
    api = Api(engine, name, str(args.model), args.api_key)
    app = api.make_app()
    if playground is not None:
        app = api.make_app(playground.routes(), HOSTS)
    config = uvicorn.Config(
        app,
        args.host,
        args.port,
        log_level="warning",
        access_log=False,
        date_header=False,  # main_loop does not update it
        timeout_graceful_shutdown=GRACE,
    )
    listener = config.bind_socket()
    # Otherwise the kernel holds back what is written after the headers until the client has
    # acknowledged these, up to 40 ms. asyncio sets this only for sockets that it binds itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = listener.getsockname()[1]
    greeting = f"nanovllm: serving {name} on http://{args.host}:{port}"
    try:
        Server(config, engine, greeting).run([listener])
    finally:
        engine.stop(SHUTDOWN)
        if engine.is_alive():
            engine.join()
    if engine.has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
