"""Takes from the calling process everything but computing, its pipes and one folder. Linux on x86-64, without root.

Runs in the child before a line of the untrusted program does; the standard library alone is imported. Nothing of it can
be undone by the process: limits are hard, and Landlock and seccomp cannot be taken off.

| what | by |
|---|---|
| no network, no child processes, no signals to others, no tracing, no mounts | seccomp: a list of allowed calls |
| no file outside the scratch folder is written, none but the standard library's is read | Landlock |
| processor time, memory, size of a file, open files, no core dumps | resource limits |
| no privileges, should the user be root | capabilities given up, `no_new_privs` |

Both filters are called directly (landlock(7), seccomp(2)): no package is needed.
"""

import ctypes
import os
import platform
import resource
import struct
import sysconfig
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _CAPSET = 444, 445, 446, 126

# System calls of x86-64 that are allowed whatever their arguments: reading, writing and waiting on what is open,
# memory, time, the process's own signals, and names of files (which Landlock judges).
_ALLOWED = (
    *(
        0,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
        17,
        18,
        19,
        20,
        21,
        22,
        23,
        24,
        25,
        27,
        28,
        32,
        33,
        34,
        35,
        36,
    ),
    *(37, 38, 39, 45, 53, 60, 63, 74, 75, 77, 78, 79, 80, 82, 87, 89, 95, 96, 97, 98, 99, 100, 102, 104, 107),
    *(108, 110, 111, 131, 186, 201, 202, 204, 213, 217, 218, 219, 228, 229, 230, 231, 232, 233, 262, 263, 264),
    *(267, 269, 270, 271, 273, 281, 290, 291, 292, 293, 316, 318, 324, 332, 334, 439),
)
_OPEN, _OPENAT, _IOCTL, _FCNTL, _CLONE, _TGKILL, _PRLIMIT, _CLONE3 = 2, 257, 16, 72, 56, 234, 302, 435
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # copies, flags; none that sends signals to another process
_IOCTL_REQUESTS = (0x5421, 0x5450, 0x5451)  # FIONBIO, FIONCLEX, FIOCLEX
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080
_AUDIT_X86_64 = 0xC000003E
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOTTY, _ENOSYS = 1, 25, 38

_WRITE_FILE, _READ_FILE, _READ_DIR = 2, 4, 8
_REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_DEVICES = (("/dev/null", _READ_FILE | _WRITE_FILE), ("/dev/urandom", _READ_FILE), ("/dev/zero", _READ_FILE))


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_seconds: int = 10
    """processor time of the whole process"""
    memory_bytes: int = 1 << 30
    """address space"""
    file_bytes: int = 1 << 22
    """of one file, and of all that stands in the scratch folder"""
    output_bytes: int = 1 << 20
    """what it may print"""
    open_files: int = 64
    threads: int = 64


class NotConfined(RuntimeError):
    """The kernel refused a part; the message says which."""


def missing_parts() -> list[str]:
    """Return what this machine's kernel lacks of "seccomp" and "landlock"; asking changes nothing."""
    is_linux = os.uname().sysname == "Linux" and platform.machine() == "x86_64"
    has_seccomp = is_linux and _LIBC.prctl(21, 0, 0, 0, 0) >= 0
    has_landlock = is_linux and landlock_version() >= 1
    return [name for name, is_there in (("seccomp", has_seccomp), ("landlock", has_landlock)) if not is_there]


def landlock_version() -> int:
    """Return Landlock's version in this kernel; below 1 it is not there."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def confine(scratch: str, limits: Limits, *, has_landlock: bool = True) -> None:
    """Confine this process to `scratch` and `limits`, for good. Raises NotConfined where the kernel refuses."""
    _LIBC.prctl(_PDEATHSIG, 9, 0, 0, 0)
    _LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    for name, limit in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (limit, limit))
    _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if has_landlock:
        _restrict_files(scratch)
    if os.geteuid() == 0:
        header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
        _check(_LIBC.syscall(_CAPSET, header, data), "capabilities")
    _restrict_calls()


def _check(result: int, part: str) -> int:
    if result < 0:
        raise NotConfined(f"{part}: {os.strerror(ctypes.get_errno())}")
    return result


def library_folders() -> list[str]:
    """Return what a program may read: the standard library, shared libraries, time zones."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")]
    paths += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return [path for path in dict.fromkeys(paths) if path and os.path.isdir(path)]


def _restrict_files(scratch: str) -> None:
    """Landlock: read the libraries, read and write in the scratch folder, nothing else."""
    version = _check(landlock_version(), "landlock")
    handled = 0x1FFF | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled |= 1 << 15 if version >= 5 else 0
    attributes = struct.pack("Q", handled)
    attributes += struct.pack("Q", 3) if version >= 4 else b""  # no TCP port is bound or connected
    attributes += struct.pack("Q", 3) if version >= 6 else b""  # no abstract socket, no signal to the outside
    ruleset = _check(_LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    rules = [(path, _READ_FILE | _READ_DIR) for path in library_folders()]
    rules += [(path, rights) for path, rights in _DEVICES if os.path.exists(path)]
    everything = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
    rules.append((scratch, everything))
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights & handled, descriptor)
        _check(_LIBC.syscall(_ADD_RULE, ruleset, 1, rule, 0), "landlock")
        os.close(descriptor)
    _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
    os.close(ruleset)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


_LOAD, _RETURN, _EQUAL, _ANY_BIT, _AND = 0x20, 0x06, 0x15, 0x45, 0x54


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Of the call `number`, which is in the accumulator, run the body; it must return."""
    return [_jump(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int, *, high: bool = False) -> bytes:
    return _statement(_LOAD, 16 + 8 * index + 4 * high)


def _one_of(values: tuple[int, ...], otherwise: int) -> list[bytes]:
    """Allow where the accumulator is one of the values."""
    tests = [piece for value in values for piece in (_jump(_EQUAL, value, 0, 1), _statement(_RETURN, _ALLOW))]
    return [*tests, _statement(_RETURN, _ERRNO | otherwise)]


def call_filter() -> bytes:
    """Return the seccomp program: instructions of 8 bytes."""
    allow, refuse = _statement(_RETURN, _ALLOW), _statement(_RETURN, _ERRNO | _EPERM)
    truncating = os.O_TRUNC | os.O_ACCMODE

    def judge_open(argument: int) -> list[bytes]:
        # O_TRUNC of a file that is only read: Landlock before version 3 does not see it
        return [_argument(argument), _statement(_AND, truncating), _jump(_EQUAL, os.O_TRUNC, 0, 1), refuse, allow]

    program = [_statement(_LOAD, 4), _jump(_EQUAL, _AUDIT_X86_64, 1, 0), _statement(_RETURN, _KILL),
               _statement(_LOAD, 0)]  # fmt: skip
    program += _when(_CLONE3, [_statement(_RETURN, _ERRNO | _ENOSYS)])
    program += _when(_CLONE, [_argument(0), _jump(_ANY_BIT, _CLONE_NEW, 0, 1), refuse,
                              _jump(_ANY_BIT, _CLONE_THREAD, 0, 1), allow, refuse])  # fmt: skip
    program += _when(_OPEN, judge_open(1)) + _when(_OPENAT, judge_open(2))
    program += _when(_FCNTL, [_argument(1), *_one_of(_FCNTL_COMMANDS, _EPERM)])
    program += _when(_IOCTL, [_argument(1), *_one_of(_IOCTL_REQUESTS, _ENOTTY)])
    program += _when(_TGKILL, [_argument(0), *_one_of((os.getpid(),), _EPERM)])
    # limits may be read, not set: the new limit must be a null pointer
    program += _when(_PRLIMIT, [_argument(2), _jump(_EQUAL, 0, 1, 0), refuse, _argument(2, high=True),
                                _jump(_EQUAL, 0, 1, 0), refuse, allow])  # fmt: skip
    for number in _ALLOWED:
        program += _when(number, [allow])
    return b"".join([*program, refuse])


def _restrict_calls() -> None:
    """Seccomp: only the calls of the list, for this thread and all that it starts."""
    code = call_filter()
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    _check(_LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")
