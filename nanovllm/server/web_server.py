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

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.server.connections import KEEP_ALIVE_SECONDS, Connection
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.middleware import is_loopback
from nanovllm.server.openai_api import Api
from nanovllm.server.playground import Playground
from nanovllm.utils.checks import check_int, naming
from nanovllm.utils.helpers import parse_value, report

SHUTDOWN = "the server is shutting down"
GRACE = 5  # seconds for clients that do not read
BACKLOG = 2048  # clients that wait until they are accepted
ACCEPTED_AT_ONCE = 8  # connections in an iteration of the event loop, see connections.py


class Server(uvicorn.Server):
    """Runs until the engine has stopped, which ends all streams. uvicorn then waits for clients."""

    def __init__(
        self,
        config: uvicorn.Config,
        sockets: list[socket.socket],
        engine: EngineThread,
        model: str,
    ) -> None:
        super().__init__(config)
        self.sockets = sockets
        self.engine = engine
        self.model = model

    async def main_loop(self) -> None:
        """Accept connections, start the engine, and return when it has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.engine.stop, SHUTDOWN)
        # uvicorn's backlog is also the number of connections that asyncio accepts at once.
        for each in self.sockets:
            each.listen(BACKLOG)
        self.engine.start_on(loop)
        defaults = describe_defaults(self.engine.llm.get_default_sampling_params())
        report(f"sampling defaults of generation_config.json: {defaults}")
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        port = self.sockets[0].getsockname()[1]
        report(f"serving {self.model} on http://{host}:{port}")
        await asyncio.to_thread(self.engine.join)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, but abort connections whose clients do not read.

        uvicorn would log an error for them.
        """
        asyncio.get_running_loop().call_later(GRACE, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


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
    for field in fields(Config)[1:]:
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"type": parse_value, "metavar": "VALUE"}
        if isinstance(field.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag, default=argparse.SUPPRESS, **options)
    return parser


def describe_defaults(params: SamplingParams) -> str:
    """List the parameters that differ from those of SamplingParams()."""
    usual = vars(SamplingParams())
    changed = [f"{name}={value}" for name, value in vars(params).items() if value != usual[name]]
    return ", ".join(changed) or "none"


async def bind(host: str, port: int) -> list[socket.socket]:
    """Reserve the addresses of `host`. Connections are rejected until the sockets listen."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    sockets = [each.dup() for each in server.sockets]
    server.close()
    return sockets


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with an error for arguments that must not be combined."""
    if args.api_key is not None:
        args.api_key = args.api_key.strip()  # a file that it comes from ends with a newline
    if args.api_key == "":
        parser.error("--api-key, or NANOVLLM_API_KEY, is empty: give a key, or leave it out")
    is_local = is_loopback(args.host)
    is_open = not is_local or args.allowed_origins
    if args.playground and (is_open or args.api_key or hasattr(args, "trace")):
        parser.error(
            "--playground shows every prompt to everyone who opens the page, and records every"
            " step: use a loopback --host such as 127.0.0.1, and none of --api-key,"
            " --allowed-origins and --trace"
        )
    if not is_local and args.api_key is None:
        message = f"--host {args.host} lets everyone on the network use this server"
        report(f"warning: {message}: set --api-key")


def start(args: argparse.Namespace) -> tuple[list[socket.socket], EngineThread]:
    """Reserve the address, and load the model. Raises ValueError or TypeError."""
    check_int("--port", args.port, 0, 65535)
    address = f"--host {args.host} --port {args.port} is not available, choose another address"
    with naming(address, OSError, UnicodeError):  # before the model, which takes a while
        sockets = asyncio.run(bind(args.host, args.port))
    names = [field.name for field in fields(Config)[1:]]
    options = {name: value for name, value in vars(args).items() if name in names}
    engine: EngineThread
    if args.playground:
        engine = Playground(args.model, options)
    else:
        engine = EngineThread(LLM(args.model, **options))
    with naming(address, OSError):  # another server may have listened there first
        for each in sockets:
            each.listen()
    return sockets, engine


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    try:
        sockets, engine = start(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    name = args.served_model_name
    if name is None:
        name = "demo_model" if args.model == DEMO_MODEL else args.model
    api = Api(
        engine,
        name,
        args.model,
        api_key=args.api_key,
        allowed_origins=args.allowed_origins,
        parses_reasoning=args.reasoning_parser is not None,
    )
    if isinstance(engine, Playground):
        app = api.make_app(engine.routes(api.bodies), is_local=True)
    else:
        app = api.make_app()
    config = uvicorn.Config(
        app,
        args.host,
        http=Connection,
        log_level="error",  # a warning for each invalid request would fill the log
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        date_header=False,  # main_loop does not update it
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2 * GRACE,
    )
    gc.collect()
    gc.freeze()  # otherwise each collection visits the objects of torch, and holds the GIL
    Server(config, sockets, engine, name).run(sockets)
    # sys.exit would wait for threads that still tokenize or compile.
    os._exit(0 if engine.stop_reason == SHUTDOWN else 1)
