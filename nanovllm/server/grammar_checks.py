"""Checks the grammars of clients, each in a process of its own.

features/structured_outputs/grammars.py makes the processes.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nanovllm.features.structured_outputs.grammars import GrammarCheck
from nanovllm.server.errors import ApiError

NUM_PROCESSES = 2
MAX_CHECKS = 64


@dataclass
class SharedCheck:
    """A check that one or more clients wait for."""

    check: GrammarCheck
    result: asyncio.Future[None]
    num_clients: int = 0


class GrammarChecks:
    """A queue of up to MAX_CHECKS checks, of which the first NUM_PROCESSES are running.

    Clients with the same grammar share a check. It is cancelled when the last of them has left.
    """

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(NUM_PROCESSES)
        self.checks: dict[bytes, SharedCheck] = {}

    async def run(self, check: GrammarCheck) -> BaseException | None:
        """Wait for a check, and return the error of a grammar that did not pass.

        Raises ApiError if too many checks wait.
        """
        shared = self.checks.get(check.digest)
        if shared is None:
            if len(self.checks) == MAX_CHECKS:
                raise ApiError("too many grammars wait to be compiled: try again later", status=503)
            result = asyncio.get_running_loop().run_in_executor(self.executor, check.run)
            shared = self.checks[check.digest] = SharedCheck(check, result)
        shared.num_clients += 1
        try:
            await asyncio.wait([shared.result])  # does not cancel it
        finally:
            shared.num_clients -= 1
            if shared.num_clients == 0:
                del self.checks[check.digest]
                # Remove the check from the queue, or kill its process.
                shared.result.cancel()
                shared.check.cancel()
        return shared.result.exception()
