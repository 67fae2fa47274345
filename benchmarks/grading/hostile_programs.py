"""Programs that try to break out of the sandbox, to hang it, or to be graded right without solving anything.

`@SECRET@` is a file that holds `SECRET`, `@MARK@` a path where nothing may appear, `@PORT@` a port that somebody
listens on, `@PID@` a process of the same user, `@TMP@` where scratch folders are. Where a program prints or returns
what its tests want only once it has broken out, being graded right *is* the escape.
"""

from dataclasses import dataclass

SECRET = "sesame-5417"
_SQUARE = ("assert f(12) == 144", "assert f(31) == 961")


@dataclass(frozen=True)
class HostileProgram:
    """`wanted` is the output that its test by standard input wants; "" for the asserts of a function that squares."""

    name: str
    program: str
    wanted: str = ""

    @property
    def tests(self) -> object:
        """Tests in the form of a ground truth."""
        return [{"input": "12\n", "output": self.wanted}] if self.wanted else list(_SQUARE)


def _script(name: str, program: str, wanted: str = "out") -> HostileProgram:
    return HostileProgram(name, program, wanted)


PROGRAMS = (
    # processes
    _script("fork bomb", "import os\nwhile True:\n    os.fork()"),
    _script("fork once", "import os\nif os.fork():\n    os.wait()\nprint('out')"),
    _script("vfork by subprocess", "import subprocess\nsubprocess.run(['/bin/true'], check=True)\nprint('out')"),
    _script("posix_spawn", "import os\nos.posix_spawn('/bin/true', ['true'], {})\nprint('out')"),
    _script("exec", "import os\nos.execv('/bin/echo', ['echo', 'out'])"),
    _script("system", "import os\nassert os.system('touch @MARK@') == 0\nprint('out')"),
    _script("multiprocessing", "import multiprocessing as m\n"
            "p = m.Process(target=print)\np.start()\np.join()\nprint('out')"),
    _script("daemon by two forks", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
            "        time.sleep(5)\n        open('@MARK@', 'w')\n        os._exit(0)\n    os._exit(0)\nprint('out')"),
    _script("raw clone", "import ctypes\n"
            "r = ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)\nassert r >= 0\nprint('out')"),
    _script("raw clone3", "import ctypes\nb = ctypes.create_string_buffer(88)\n"
            "r = ctypes.CDLL(None).syscall(435, b, 88)\nassert r >= 0\nprint('out')"),
    _script("new namespace", "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint('out')"),
    _script("thread bomb", "import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
            "    threading.Thread(target=time.sleep, args=(99,)).start()"),
    # others
    _script("kill the parent", "import os\nos.kill(os.getppid(), 9)\nprint('out')"),
    _script("kill everybody", "import os\nos.kill(-1, 9)\nprint('out')"),
    _script("kill the group", "import os\nos.killpg(0, 9)\nprint('out')"),
    _script("stop the parent", "import os\nos.kill(@PID@, 19)\nprint('out')"),
    _script("tgkill the parent", "import ctypes\n"
            "assert ctypes.CDLL(None).syscall(234, @PID@, @PID@, 15) == 0\nprint('out')"),
    _script("signal by an owned pipe", "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, @PID@)\n"
            "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\nprint('out')"),
    _script("trace the parent", "import ctypes\nassert ctypes.CDLL(None).ptrace(16, @PID@, 0, 0) == 0\nprint('out')"),
    _script("read the parent's memory", "print(open('/proc/@PID@/maps').read() and 'out')"),
    _script("process_vm_readv", "import ctypes\nb = ctypes.create_string_buffer(64)\n"
            "assert ctypes.CDLL(None).syscall(310, @PID@, b, 1, b, 1, 0) >= 0\nprint('out')"),
    _script("parent's limits", "import resource\nresource.prlimit(@PID@, resource.RLIMIT_CPU, (1, 1))\nprint('out')"),
    # secrets
    _script("read a file", "print(open('@SECRET@').read())", SECRET),
    _script("read by a link", "import os\nos.symlink('@SECRET@', 'link')\nprint(open('link').read())", SECRET),
    _script("read by a hard link", "import os\nos.link('@SECRET@', 'link')\nprint(open('link').read())", SECRET),
    _script("read by a relative path", "print(open('../' * 30 + '@SECRET@'.lstrip('/')).read())", SECRET),
    _script("read the own environment", "import os\nprint(os.environ['HOSTILE_SECRET'])", SECRET),
    _script("read the first environment",
            "print(open('/proc/self/environ').read().split('HOSTILE_SECRET=')[1][:11])", SECRET),
    _script("read the parent's environment",
            "print(open('/proc/@PID@/environ').read().split('HOSTILE_SECRET=')[1][:11])", SECRET),
    _script("walk descriptors", "import os\nfor fd in range(3, 64):\n    try:\n        print(os.pread(fd, 99, 0))\n"
            "    except OSError:\n        pass\nprint(open('/proc/self/fd/0').read() and 'out')"),
    _script("list folders", "import os\nos.listdir('/')\nprint('out')"),
    _script("password file", "open('/etc/passwd').read()\nprint('out')"),
    # files
    _script("write outside", "open('@MARK@', 'w').write('x')\nprint('out')"),
    _script("truncate a file that is read", "import os\nos.open('@SECRET@', os.O_RDONLY | os.O_TRUNC)\nprint('out')"),
    _script("truncate by name", "import os\nos.truncate('@SECRET@', 0)\nprint('out')"),
    _script("remove a file", "import os\nos.remove('@SECRET@')\nprint('out')"),
    _script("rename into the open", "import os\nopen('a', 'w')\nos.rename('a', '@MARK@')\nprint('out')"),
    _script("change rights", "import os\nos.chmod('@SECRET@', 0)\nprint('out')"),
    _script("fill the disk", "n = 0\nwhile True:\n    n += 1\n"
            "    with open(f'f{n}', 'wb') as f:\n        f.write(bytes(1 << 22))"),
    _script("a million files", "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'w').close()"),
    _script("one large file", "with open('f', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))"),
    _script("nested folders", "import os\nos.mkdir('a')\nprint('out')"),
    _script("special file", "import os\nos.mkfifo('pipe')\nprint('out')"),
    _script("mount", "import ctypes\nassert ctypes.CDLL(None).mount(b'/', b'.', None, 4096, None) == 0\nprint('out')"),
    # network
    _script("connect", "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 2)\nprint('out')"),
    _script("raw socket call", "import ctypes\nassert ctypes.CDLL(None).syscall(41, 2, 1, 0) >= 0\nprint('out')"),
    _script("io_uring", "import ctypes\nb = ctypes.create_string_buffer(120)\n"
            "assert ctypes.CDLL(None).syscall(425, 8, b) >= 0\nprint('out')"),
    _script("listen", "import socket\ns = socket.socket()\ns.bind(('', 0))\ns.listen()\nprint('out')"),
    # resources
    _script("endless loop", "while True:\n    pass"),
    _script("endless drip", "import time\nwhile True:\n    print('.', flush=True)\n    time.sleep(0.01)"),
    _script("endless sleep", "import time\ntime.sleep(1e6)"),
    _script("signals ignored", "import signal\nfor s in range(1, 65):\n"
            "    try:\n        signal.signal(s, signal.SIG_IGN)\n"
            "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass"),
    _script("memory", "x = []\nwhile True:\n    x.append(bytearray(1 << 26))"),
    _script("huge output", "import sys\nwhile True:\n    sys.stdout.write('x' * (1 << 20))"),
    _script("huge errors", "import sys\nwhile True:\n    sys.stderr.write('x' * (1 << 20))"),
    _script("deep recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return f(n + 1)\nf(0)"),
    _script("huge power", "print(9 ** 9 ** 9 ** 9)"),
    _script("output closed, then a loop", "import os\nos.close(1)\nwhile True:\n    pass"),
    _script("stop itself", "import signal\nsignal.raise_signal(signal.SIGSTOP)"),
    _script("raise its own limits", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))\nprint('out')"),
    # forging a verdict
    _script("exit code 0", "import sys\nsys.exit(0)"),
    _script("print a verdict", "print('ok')\nprint('passed')\nprint('{\"results\": [1]}')"),
    HostileProgram("equal to everything", "class E:\n    def __eq__(self, o): return True\n"
                   "    def __ne__(self, o): return False\n"
                   "def f(x): return E()"),
    HostileProgram("an int that equals everything", "class E(int):\n    def __eq__(self, o): return True\n"
                   "    __hash__ = int.__hash__\ndef f(x): return E(1)"),
    HostileProgram("leave with code 0", "import os\ndef f(x): os._exit(0)"),
    HostileProgram("SystemExit", "import sys\ndef f(x): sys.exit(0)"),
    HostileProgram("exit while loading", "import os\nos._exit(0)"),
    HostileProgram("assert overridden", "import builtins\nbuiltins.AssertionError = ValueError\n"
                   "class A(Exception): pass\n"
                   "def f(x): raise builtins.AssertionError"),
    HostileProgram("comparison patched", "import operator, builtins, math\noperator.eq = lambda a, b: True\n"
                   "builtins.all = lambda x: True\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0"),
    HostileProgram("harness patched", "import sys\nm = sys.modules['__main__']\nm._passes = lambda *a: True\n"
                   "m.is_same = lambda *a: True\nm._answer = lambda *a: b'ok\\n'\ndef f(x): return 0"),
    HostileProgram("reply for all tests at once", "import os\ndef f(x):\n    for fd in range(1, 64):\n"
                   "        try:\n"
                   "            os.write(fd, b'ok\\nok\\nok\\n')\n"
                   "        except OSError:\n            pass\n    return 0"),
    HostileProgram("read the tests", "import glob, re\ntext = ''\n"
                   "for p in glob.glob('@TMP@/espalier-sandbox-*/tests.json'):\n"
                   "    text += open(p).read()\nwanted = dict(re.findall(r'f.(\\d+). == (\\d+)', text))\n"
                   "def f(x): return int(wanted[str(x)])"),
    HostileProgram("read the tests from frames", "import sys\ndef f(x):\n    g = sys._getframe(1)\n    while g:\n"
                   "        for v in list(g.f_locals.values()):\n"
                   "            if isinstance(v, (str, bytes)) and '==' in str(v):\n"
                   "                return int(str(v).split('== ')[1][:3])\n        g = g.f_back"),
    HostileProgram("a class instead of a value", "class f:\n"
                   "    def __init__(self, x): pass\n    def __eq__(self, o): return True"),
    HostileProgram("pickle in the reply", "import pickle\nclass P:\n    def __reduce__(self): return (print, ('ok',))\n"
                   "def f(x): return pickle.dumps(P())"),
    HostileProgram("a reply nested too deep", "def f(x):\n    v = []\n    for _ in range(900): v = [v]\n    return v"),
    HostileProgram("a reply without end", "def f(x): return 'x' * (1 << 25)"),
    HostileProgram("a loop in a test", "def f(x):\n    while True: pass"),
    HostileProgram("a hash that raises", "def f(x): return {float('nan'): f}"),
)  # fmt: skip
