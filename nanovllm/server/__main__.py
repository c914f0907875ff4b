"""Serve OpenAI's API: python -m nanovllm.server MODEL [--port 8000] [engine options].

MODEL is a checkpoint directory or a Hub id, and defaults to the demo model. All options of the
engine are options here, such as --max-model-len 2048.
"""

import argparse
import asyncio
import ipaddress
import signal
import sys
from dataclasses import fields
from typing import Any

import uvicorn

from nanovllm import DEMO_MODEL, LLM
from nanovllm.checks import parse_value
from nanovllm.config import Config
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.openai_api import Api
from nanovllm.server.playground import HOSTS, Playground

SHUTDOWN = "the server is shutting down"
GRACE = 5  # seconds for clients that do not read


class Server(uvicorn.Server):
    """Runs until the engine has stopped, which ends all streams. uvicorn then waits for clients."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, model: str) -> None:
        super().__init__(config)
        self.engine = engine
        self.model = model

    async def main_loop(self) -> None:
        """Sleep until a signal or a failure has ended the engine."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.engine.stop, SHUTDOWN)
        self.engine.start_on(loop)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.servers[0].sockets[0].getsockname()[1]
        print(
            f"nanovllm: serving {self.model} on http://{host}:{port}", file=sys.stderr, flush=True
        )
        await asyncio.to_thread(self.engine.join)


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
    add("--api-key", metavar="KEY", help="clients of /v1 must send it as a bearer token")
    add(
        "--playground",
        action="store_true",
        help="serve a page that shows and controls every step",
    )
    group = parser.add_argument_group("engine options, see help(nanovllm.config.Config)")
    for field in fields(Config)[1:]:
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"type": parse_value, "metavar": "VALUE"}
        if isinstance(field.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag, default=argparse.SUPPRESS, **options)
    return parser


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
    if args.playground and (args.host not in HOSTS or args.api_key or "trace" in options):
        parser.error(
            "--playground shows every prompt to everyone who opens the page, and records every"
            f" step: use a --host of {', '.join(HOSTS)}, and neither --api-key nor --trace"
        )
    if not is_loopback(args.host) and args.api_key is None:
        message = f"warning: --host {args.host} lets everyone on the network use this server"
        print(f"nanovllm: {message}: set --api-key", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))  # while the model loads
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
    Server(config, engine, name).run()
    if engine.stop_reason != SHUTDOWN:
        sys.exit(1)


if __name__ == "__main__":
    main()
