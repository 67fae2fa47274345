"""One vLLM engine in a process of its own, which answers calls over a socket: the other end of
`sampling.child_engine`.

    python -m espalier.sampling.engine_process DESCRIPTOR

Messages are pickles behind their length: the engine's settings first, answered when it is loaded; then tuples:
(number, method of `OneProcessEngine`, arguments), answered by (number, result, error or None) in any order; (number,
"cancel", ()) takes a request back. While it owes samples it says every second how many tokens it has drawn for each:
(`DRAWN`, tokens by the ids of requests, None). It ends when the other end of the socket is closed.
"""

import asyncio
import contextlib
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from espalier.sampling.client import EngineFailed, Refused, ServerGone, one_line

CANCEL = "cancel"
DRAWN = -1
_LENGTH = 8
_DRAWN_SECONDS = 1.0


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Put a message on its way."""
    packed = pickle.dumps(message)
    writer.write(len(packed).to_bytes(_LENGTH, "little") + packed)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises EOFError where the other end is closed."""
    try:
        size = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None


async def _answer(client: Any, call: tuple[int, str, tuple[Any, ...]], writer: asyncio.StreamWriter) -> None:
    number, name, arguments = call
    value: Any = None
    error: Exception | None = None
    try:
        value = await getattr(client, name)(*arguments)
    except Refused as failure:
        error = failure
    except ServerGone as failure:
        error = EngineFailed(str(failure))
    except Exception as failure:  # the other end waits for an answer
        error = ServerGone(one_line(failure))
    try:
        send(writer, (number, value, error))
    except (pickle.PicklingError, TypeError, AttributeError) as failure:
        send(writer, (number, None, ServerGone(one_line(failure))))


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del tasks[number]


async def _say_drawn(client: Any, writer: asyncio.StreamWriter) -> None:
    """Only what is said before the engine is gone can be known of samples that nobody gets."""
    try:
        while True:
            await asyncio.sleep(_DRAWN_SECONDS)
            if drawn := client.drawn_so_far():
                send(writer, (DRAWN, drawn, None))
    except Exception:  # of another vLLM: requests are answered all the same
        print("this engine cannot say what it has drawn for unfinished samples:", file=sys.stderr)
        traceback.print_exc()


async def serve(descriptor: int, make_client: Callable[..., Any]) -> None:
    """Answer until the socket is closed, which raises EOFError."""
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)  # or a child of this process would keep it open
    reader, writer = await asyncio.open_connection(sock=end)
    client = make_client(**await receive(reader))
    await _answer(client, (0, "open", ()), writer)
    tasks: dict[int, asyncio.Task[None]] = {}
    saying = asyncio.create_task(_say_drawn(client, writer))
    try:
        while True:
            call = await receive(reader)
            number, name, _ = call
            if name == CANCEL:
                if number in tasks:
                    tasks[number].cancel()
                continue
            tasks[number] = asyncio.create_task(_answer(client, call, writer))
            tasks[number].add_done_callback(partial(_forget, tasks, number))
    finally:
        saying.cancel()


if __name__ == "__main__":
    from espalier.sampling.one_process_engine import OneProcessEngine

    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), OneProcessEngine))
