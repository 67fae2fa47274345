"""The process that symbolic workers are forked from, and the workers.

    python -m espalier.data.answers.worker FD

A fork of a process that has SymPy and the LaTeX grammar loaded and warm takes milliseconds, an import takes
seconds: so a worker that hangs or eats memory is killed and replaced at once. Over the socket FD come lines:
`fork` (with a socket for the new worker attached) is answered with its process id, `kill PID` ends a worker.
A worker reads one JSON request a line and writes one JSON answer a line.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

_MEMORY_BYTES = 1 << 30
_CPU_SECONDS = 3
_MAX_REQUESTS = 5000
_PR_SET_PDEATHSIG = 1


def _match(pattern: str, text: str) -> dict[str, str]:
    try:
        return {"verdict": "right" if re.match(pattern, text, re.DOTALL) else "wrong", "reason": ""}
    except (MemoryError, RecursionError):
        return {"verdict": "unparseable", "reason": "too much memory"}


def _answer(request: dict[str, Any]) -> dict[str, str]:
    if "pattern" in request:
        return _match(request["pattern"], request["text"])
    from espalier.data.answers.symbolic import compare
    from espalier.data.answers.sympy_text import TooHard

    try:
        forms = [(bool(one), bool(other)) for one, other in request["forms"]]
        verdict, reason = compare(request["gold"], request["answer"], forms)
    except TooHard as error:
        verdict, reason = "unparseable", f"too hard: {error}"
    except MemoryError:
        verdict, reason = "unparseable", "too much memory"
    except RecursionError:
        verdict, reason = "unparseable", "nested too deep"
    except Exception as error:
        verdict, reason = "unparseable", f"{type(error).__name__} in the symbolic library"
    return {"verdict": verdict, "reason": reason}


def _work(connection: socket.socket) -> None:
    """The worker's loop; ends with its connection, or after some thousand requests (SymPy's caches grow)."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with connection.makefile("rb") as lines:
        for number, line in enumerate(lines, 1):
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + _CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            answer = _answer(json.loads(line))
            answer["is_last"] = number >= _MAX_REQUESTS  # type: ignore[assignment]
            connection.sendall(json.dumps(answer).encode() + b"\n")
            if answer["is_last"]:
                return


def _fork(control: socket.socket, connection: socket.socket, children: set[int]) -> None:
    child = os.fork()
    if child == 0:
        code = 0
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            control.close()
            _work(connection)
        except BaseException:
            code = 1
        finally:
            os._exit(code)
    connection.close()
    children.add(child)
    control.sendall(f"{child}\n".encode())


def _reap(children: set[int]) -> None:
    for child in list(children):
        with suppress(ChildProcessError):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)


def main() -> None:
    """Warm up, say `ready`, then fork and kill on request until the socket closes."""
    from espalier.data.answers.symbolic import warm_up

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    warm_up()
    control.sendall(b"ready\n")
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not data:
            break
        _reap(children)
        command = data.decode().split()
        if command[0] == "fork":
            _fork(control, socket.socket(fileno=descriptors[0]), children)
        elif command[0] == "kill":
            child = int(command[1])
            if child in children:
                os.kill(child, signal.SIGKILL)  # collected by a later _reap: freeing its memory can take long
            control.sendall(b"gone\n")
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
