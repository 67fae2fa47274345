"""The two processes of the sandbox, confined before they do anything.

    python -m espalier.data.sandbox.child ROLE SCRATCH LIMITS HAS_LANDLOCK READY CALLS REPLIES

`script` runs SCRATCH/program.py as a program: it reads its standard input and prints. `serve` runs it as a module and
then answers calls of its functions: one line on the pipe CALLS in, one on REPLIES out. `test` runs the tests of
SCRATCH/tests.json against such a server, whose functions it knows by name alone, and prints one line per test. So the
program under test never sees an expected value and never shares a process with what judges it. On the pipe READY comes
`ready` once the process is confined.
"""

import builtins
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from espalier.data.sandbox.confine import Limits, confine
from espalier.data.sandbox.plain_values import read_line, write_line

_MAX_REPLY = 4 << 20


class CallFailed(Exception):
    """The program's function raised what is no plain exception, ended the process, or gave no plain value."""


def _source(scratch: str) -> str:
    with open(os.path.join(scratch, "program.py"), encoding="utf-8") as file:
        return file.read()


def run_script(scratch: str) -> None:
    """Run the program as `python program.py` would."""
    exec(compile(_source(scratch), "program.py", "exec"), {"__name__": "__main__", "__builtins__": builtins})


def serve(scratch: str, calls: int, replies: int) -> None:
    """Run the program as a module, then answer calls until the pipe closes. What it prints goes nowhere."""
    namespace: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    failure = ""
    os.dup2(2, 1)
    try:
        exec(compile(_source(scratch), "program.py", "exec"), namespace)
    except BaseException as error:  # the program's own; every call of it fails with the same
        failure = type(error).__name__
    with os.fdopen(calls, "rb") as asked, os.fdopen(replies, "wb", buffering=0) as answered:
        for line in asked:
            answered.write(write_line({"error": failure}) if failure else _answer(namespace, line))


def _answer(namespace: dict[str, Any], line: bytes) -> bytes:
    try:
        name, positional, named = read_line(line)
        function = namespace.get(name)
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), name, None)
        if function is None:
            return write_line({"error": "NameError"})
        return write_line({"value": function(*positional, **named)})
    except BaseException as error:
        return write_line({"error": type(error).__name__})


@dataclass
class _Server:
    """The pipes to the process with the program; `is_gone` once it has ended, or a reply of it is no whole line."""

    calls: BinaryIO
    replies: BinaryIO
    is_gone: bool = False
    num_replies: int = 0

    def ask(self, name: str, positional: list[Any], named: dict[str, Any]) -> Any:
        """Return the reply. Raises CallFailed where none comes."""
        try:
            self.calls.write(write_line([name, positional, named]))
            line = self.replies.readline(_MAX_REPLY)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):  # nothing, or more than may cross: the rest would be read as the next reply
            self.is_gone = True
            raise CallFailed(f"{name}: the program has ended, or its reply does not")
        self.num_replies += 1
        return read_line(line)


def _remote(name: str, server: _Server) -> Callable[..., Any]:
    """Return a function that asks the server. It raises what the server says was raised, where that is built in."""

    def call(*positional: Any, **named: Any) -> Any:
        reply = server.ask(name, list(positional), named)
        if "value" in reply:
            return reply["value"]
        kind = getattr(builtins, str(reply["error"]), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
            raise kind(f"raised by {name}")
        raise CallFailed(f"{name}: {reply['error']}")

    call.__name__ = name
    return call


def is_same(one: Any, other: Any) -> bool:
    """Say whether a result is the expected JSON value: a tuple is a list, an int a float; a bool is no number; floats
    agree to nine digits."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        texts = {str(key): value for key, value in one.items()}
        return len(texts) == len(other) and all(key in texts and is_same(texts[key], other[key]) for key in other)
    return type(one) is type(other) and bool(one == other)


def _passes(test: dict[str, Any], server: _Server) -> bool:
    """Say whether one test holds; anything that it raises is a failure, and so is one that asks the program nothing."""
    before = server.num_replies
    try:
        if "call" in test:
            return _is_expected(_remote(test["call"], server)(*test["args"]), test)
        namespace: dict[str, Any] = {"__name__": "tests"}
        namespace |= {name: __import__(name) for name in test["modules"]}
        namespace |= {name: _remote(name, server) for name in test["functions"]}
        exec(compile(test["source"], "test", "exec"), namespace)
    except (Exception, SystemExit):
        return False
    return server.num_replies > before


def _is_expected(result: Any, test: dict[str, Any]) -> bool:
    expected = test["expected"]
    return is_same(result, expected) or (test["may_be_bare"] and is_same(result, expected[0]))


def run_tests(scratch: str, calls: int, replies: int) -> None:
    """Print `ok`, `failed` or `gone` (the program has ended; the tests after it are not run) per test."""
    with open(os.path.join(scratch, "tests.json"), encoding="utf-8") as file:
        tests = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints is no verdict
    with os.fdopen(calls, "wb", buffering=0) as asked, os.fdopen(replies, "rb") as answered:
        server = _Server(asked, answered)
        for test in tests:
            has_passed = _passes(test, server)
            print("gone" if server.is_gone else "ok" if has_passed else "failed", file=verdicts, flush=True)
            if server.is_gone:
                return


def main() -> None:
    """See the module."""
    role, scratch, limits, has_landlock, ready, calls, replies = sys.argv[1:]
    os.chdir(scratch)
    sys.path[:] = [path for path in sys.path if path.startswith((sys.base_prefix, sys.base_exec_prefix))]
    sys.argv = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # which `site` would have set
    confine(scratch, Limits(**json.loads(limits)), has_landlock=has_landlock == "1")
    os.write(int(ready), b"ready")
    os.close(int(ready))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if role == "script":
        run_script(scratch)
    elif role == "serve":
        serve(scratch, int(calls), int(replies))
    else:
        run_tests(scratch, int(calls), int(replies))


if __name__ == "__main__":
    main()
