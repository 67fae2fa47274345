"""How the ranks of a run come together, and that they end together.

They meet at the store of the launcher (MASTER_ADDR, MASTER_PORT); there rank 0 says on which port it listens for the
others (`runtime.peers`).
"""

import datetime
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from espalier.runtime.errors import line_of
from espalier.runtime.machine_starts import START
from espalier.runtime.peers import END, START_SECONDS, Peers
from espalier.runtime.ranks import rank, world_size

_LINE_SECONDS = 30.0  # for one message


class RanksApart(RuntimeError):
    """The ranks do not find one another."""

    exit_code = 3


class BadLaunch(ValueError):
    """There are to be several ranks, and nothing says how they find one another."""

    exit_code = 2


_peers: Peers | None = None
_store: Any = None


def peers() -> Peers | None:
    """Return those of this process, None on one process."""
    return _peers


def store() -> Any:
    """Return torch's key-value store that the ranks came together by."""
    return _store


@contextmanager
def company() -> Iterator[None]:
    """Give the ranks of a launcher in company for the length of the block: what one raises ends all, with its exit
    code.

    Nothing on one process, or within another such block. Raises RankFailed where another rank failed.
    """
    global _peers, _store
    if world_size() == 1 or _peers is not None:
        yield
        return
    _peers, _store = _connect()
    try:
        with sharing_errors():
            yield
            _peers.meet(END)
    finally:
        _peers.leave()
        _peers = _store = None


@contextmanager
def sharing_errors() -> Iterator[None]:
    """Give share what the block raises with every rank; RankFailed is raised in its place where another rank was
    first."""
    try:
        yield
    except BaseException as error:
        other = _peers.settle(error) if _peers is not None else None
        if other is None:
            raise
        raise other from None


def _connect() -> tuple[Peers, Any]:
    """Return (the peers, the store) once all ranks are there. Raises RanksApart where one does not come, BadLaunch."""
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=START_SECONDS)
    try:
        found, *_ = next(iter(dist.rendezvous("env://", timeout=limit)))  # type: ignore[attr-defined]
        if START in os.environ:  # what ranks of an earlier start have said may stand in it
            found = dist.PrefixStore(os.environ[START], found)  # type: ignore[attr-defined]
        own = f"process {os.getpid()} on {socket.gethostname()}"
        if rank() == 0:
            return Peers(*_listen(found, own)), found
        line = _call(found, own)
        return Peers({0: line}, {0: found.get("espalier/name").decode()}), found
    except ValueError as error:
        raise BadLaunch(f"WORLD_SIZE is {world_size()}, but {error}: start the program by launch.py") from None
    except (dist.DistError, OSError) as error:
        raise RanksApart(f"the {world_size()} ranks did not find one another ({line_of(error)[:200]}): did all start, "
                         "and is MASTER_ADDR:MASTER_PORT in reach?") from None  # fmt: skip


def _listen(store: Any, own: str) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """On rank 0: (a line to every other rank, their names)."""
    token = secrets.token_hex(16)
    lines: dict[int, socket.socket] = {}
    names: dict[int, str] = {}
    with _server() as server:
        server.settimeout(START_SECONDS)
        store.set("espalier/name", own)
        store.set("espalier/line", f"{server.getsockname()[1]} {token}")
        while len(lines) < world_size() - 1:
            line, _ = server.accept()
            words = _first_line(line).split(" ", 2)
            if len(words) == 3 and words[0] == token:
                lines[int(words[1])], names[int(words[1])] = line, words[2]
            else:
                line.close()  # a stranger
    return lines, names


def _server() -> socket.socket:
    """Return a listening socket on a free port, of both versions of IP where there are two."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=world_size(), dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=world_size())


def _first_line(line: socket.socket) -> str:
    """Return what the other end says first, and nothing of what follows; empty where that is no line."""
    line.settimeout(_LINE_SECONDS)
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 1000:
            letter = line.recv(1)
            if not letter:
                return ""
            text += letter
        return text.decode().rstrip("\n")
    except (OSError, UnicodeDecodeError):
        return ""


def _call(store: Any, own: str) -> socket.socket:
    """On the other ranks: the line to rank 0, which listens on the machine of the store."""
    port, token = store.get("espalier/line").decode().split()
    line = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=_LINE_SECONDS)
    line.sendall(f"{token} {rank()} {own}\n".encode())
    return line
