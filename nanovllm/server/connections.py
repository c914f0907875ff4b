"""Limits on connections: their number, the time that a client has, and the size of a header.

uvicorn limits only the time between two requests, and counts connections only when a request has
arrived. Clients that send nothing would use up the file descriptors of the process.
"""

import asyncio
import re
import resource
from functools import cache
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanovllm.server.errors import ApiError
from nanovllm.server.middleware import log, respond_error

REQUEST_SECONDS = 30  # for a client to connect and to send a request
KEEP_ALIVE_SECONDS = 75  # between requests, longer than proxies reuse an idle connection
PROBE_SECONDS = 0.05
MAX_HEADER_BYTES = 2**16
LINE_BYTES = 32  # for the memory that each line of a header takes, as in HTTP/2
MAX_CONNECTIONS = 4096
# Java's clients ask for HTTP/2 with this header. httptools would drop the body of such a request.
UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)


@cache  # because each new connection asks
def choose_max_connections() -> int:
    """Return how many connections to serve.

    Half of the file descriptors are left for everything else, such as connections above the limit
    until they are rejected.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(num_files // 2, MAX_CONNECTIONS)


@cache  # because there can be thousands of such connections
def report_limit() -> None:
    log(f"{choose_max_connections()} connections are open: others get a 503")


class Connection(HttpToolsProtocol):
    """A connection to a client."""

    timer: asyncio.TimerHandle | None = None  # runs while the server waits for a request
    is_header_incomplete = False
    num_header_bytes = 0  # in complete lines, with LINE_BYTES for each
    # Bytes since the last complete line, without the rest of the segment that ended it.
    num_line_bytes = 0
    running: RequestResponseCycle | None = None  # the newest request that is not in the pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > choose_max_connections():
            report_limit()
            self._reject(503, "the server has no free connection: try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        # uvicorn marks only the newest request as disconnected, which can be in the pipeline.
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()

    def data_received(self, data: bytes) -> None:
        data = UPGRADE.sub(b"\r\nx-upgra", data)
        self.num_line_bytes += len(data)
        super().data_received(data)
        if self.is_header_incomplete and self.num_line_bytes > MAX_HEADER_BYTES:
            self._reject_header()
        # uvicorn's timer between two requests has been stopped, also by an empty line.
        if self.timer is None and not self._is_answering():
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_header_incomplete = True
        self.num_header_bytes = LINE_BYTES
        self.num_line_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called for each line of a header, and for those that follow a chunked body."""
        super().on_header(name, value)
        self.num_line_bytes = 0
        self._count_header_bytes(len(name) + len(value) + LINE_BYTES)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self.num_header_bytes += num_bytes
        if self.num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the header is too large")  # ends the parser

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.is_header_incomplete = False
        if not self.pipeline:
            self.running = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            self.running, _ = self.pipeline[-1]
        super().on_response_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to go on although the client has closed its side.

        A client that waits for the reply (`nc -N`) and one that has vanished send the same FIN.
        They differ in what follows when the server writes: the system of the latter resets the
        connection, which makes the next write fail. So something is written that clients ignore.
        HTTP/1.0 has nothing like that. Older releases of nginx use it, and close both sides.
        """
        if not self._is_answering() or self.pipeline or self.cycle.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(PROBE_SECONDS)
        return True

    def _probe(self, delay: float) -> None:
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self.cycle.chunked_encoding:
            self.transport.write(b"2\r\n:\n\r\n")  # a comment among server-sent events
        self.loop.call_later(delay, self._probe, 2 * delay)

    def _is_answering(self) -> bool:
        """Return whether a request is complete and its reply is not."""
        cycle = self.cycle
        is_idle = cycle is None or cycle.response_complete or cycle.more_body
        return bool(self.pipeline) or not is_idle

    def _start_timer(self) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(REQUEST_SECONDS, self._time_out)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _time_out(self) -> None:
        if self._is_answering():  # the next request has begun to arrive, and is not read yet
            self._start_timer()
        else:
            self._reject(408, f"no complete request arrived within {REQUEST_SECONDS} seconds")

    def send_400_response(self, msg: str) -> None:
        if self.num_header_bytes > MAX_HEADER_BYTES:
            self._reject_header()
        else:
            self._reject(400, msg)

    def _reject_header(self) -> None:
        self._reject(431, f"the header exceeds {MAX_HEADER_BYTES} bytes")

    def _reject(self, status: int, message: str) -> None:
        """Close the connection, with an error object unless a reply has begun."""
        if self.transport.is_closing():
            return
        response = respond_error(ApiError(message, status=status))
        response.headers["connection"] = "close"
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        cycle = self.running
        if cycle is None or cycle.response_complete or not cycle.response_started:
            head = "\r\n".join([*lines, "", ""])
            self.transport.write(head.encode() + bytes(response.body))
        self.transport.close()
