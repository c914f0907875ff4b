"""Serve OpenAI's API: python -m nanovllm.server MODEL [--port 8000] [engine options].

MODEL is a checkpoint directory or a Hub id, and defaults to the demo model. All options of the
engine are options here, such as --max-model-len 2048.
"""

import argparse
import asyncio
import gc
import os
import signal
import socket
from dataclasses import fields
from typing import Any

import uvicorn

from nanovllm import DEMO_MODEL, LLM
from nanovllm.config import Config
from nanovllm.features.structured_outputs.grammars import compiling
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.live_page import LivePage
from nanovllm.server.middleware import LOOPBACK
from nanovllm.server.openai_api import Api
from nanovllm.server.playground import Playground
from nanovllm.utils.checks import naming
from nanovllm.utils.helpers import parse_value, report

SHUTDOWN = "the server is shutting down"
GRACE = 5  # seconds for clients to read the ends of their streams
# All but the model, each with its default.
ENGINE_OPTIONS = {field.name: field.default for field in fields(Config)[1:]}
KEEP_ALIVE_SECONDS = 75  # between requests, longer than proxies reuse an idle connection


class Server(uvicorn.Server):
    """Runs until the engine has stopped, which ends all streams. uvicorn then waits for clients."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread) -> None:
        super().__init__(config)
        self.engine = engine

    async def main_loop(self) -> None:
        """Start the engine, and return when it has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.engine.stop, SHUTDOWN)
        self.engine.start_on(loop)
        await asyncio.to_thread(self.engine.join)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, and end the process, also if a client does not read."""
        await super().shutdown(sockets)
        # sys.exit would wait for threads that still tokenize or compile.
        for process in list(compiling):
            process.kill()
        os._exit(0 if self.engine.stop_reason == SHUTDOWN else 1)


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
    add(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("NANOVLLM_API_KEY"),
        help="clients must send it as a bearer token (default: NANOVLLM_API_KEY of the"
        " environment, which other users of this machine cannot see)",
    )
    add(
        "--playground",
        action="store_true",
        help="serve a page that shows and controls every step",
    )
    add(
        "--served-model-name",
        metavar="NAME",
        help="name of the model for clients (default: MODEL, or demo_model)",
    )
    add(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that may send requests, such as http://localhost:3000, or * for all",
    )
    add(
        "--reasoning-parser",
        choices=["qwen3"],
        help="return what a chat's reply has between <think> and </think> as `reasoning`",
    )
    group = parser.add_argument_group("engine options, see help(nanovllm.config.Config)")
    for name, default in ENGINE_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        options: dict[str, Any] = {"type": parse_value, "metavar": "VALUE"}
        if isinstance(default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag, default=argparse.SUPPRESS, **options)
    return parser


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address. Connections are rejected until the socket listens."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, port))
    return reserved


def start(args: argparse.Namespace) -> tuple[socket.socket, EngineThread]:
    """Reserve the address, and load the model. Raises ValueError or TypeError."""
    is_open = args.host not in LOOPBACK or args.allowed_origins
    if args.playground and (is_open or args.api_key or hasattr(args, "trace")):
        raise ValueError(
            "--playground shows every prompt to everyone who opens the page, and records every"
            " step: use --host 127.0.0.1, localhost or ::1, and none of --api-key,"
            " --allowed-origins and --trace"
        )
    address = f"--host {args.host} --port {args.port} is not available, choose another address"
    # Before the model is loaded, which takes a while.
    with naming(address, OSError, OverflowError, UnicodeError):
        reserved = bind(args.host, args.port)
    options = {name: value for name, value in vars(args).items() if name in ENGINE_OPTIONS}
    engine: EngineThread
    if args.playground:
        engine = Playground(args.model, options)
    else:
        engine = EngineThread(LLM(args.model, **options))
    reserved.listen()
    return reserved, engine


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.api_key is not None:
        args.api_key = args.api_key.strip()  # a file that it comes from ends with a newline
        if not args.api_key:
            parser.error("--api-key, or NANOVLLM_API_KEY, is empty: give a key, or leave it out")
    try:
        reserved, engine = start(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    name = args.served_model_name or args.model
    if name == DEMO_MODEL:
        name = "demo_model"
    api = Api(
        engine,
        name,
        args.model,
        api_key=args.api_key,
        allowed_origins=args.allowed_origins,
        parses_reasoning=args.reasoning_parser is not None,
    )
    if isinstance(engine, Playground):
        app = api.make_app(LivePage(engine).routes(api.post), is_local=True)
    else:
        app = api.make_app()
    config = uvicorn.Config(
        app,
        http="h11",  # ends a request whose client has left, also if the client has sent another one
        ws="none",
        log_level="error",  # a warning for each invalid request would fill the log
        access_log=False,
        date_header=False,  # main_loop does not update it
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE,
    )
    gc.collect()
    gc.freeze()  # otherwise each collection visits the objects of torch, and holds the GIL
    host = f"[{args.host}]" if ":" in args.host else args.host
    report(f"serving {name} on http://{host}:{reserved.getsockname()[1]}")
    Server(config, engine).run([reserved])
