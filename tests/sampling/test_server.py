"""A server of our own: how it starts, what is said when it cannot, and that nothing of it stays behind.

Most tests put a small program in the place of vLLM; those marked `server` start the real one.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.models import precision
from espalier.models.precision import has_fast_bf16
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.child_process import CannotStart, group_members
from espalier.sampling.client import SampleRequest, SamplingParams, ServerGone
from espalier.sampling.data_parallel_engines import DataParallelEngines
from espalier.sampling.engine_arguments import engine_dtype
from espalier.sampling.offline_client import OfflineClient
from espalier.sampling.server import PortInUse, VLLMServer, check_port, free_port
from espalier.sampling.vllm_client import VLLMClient

ROOT = Path(__file__).resolve().parent.parent.parent

# Answers what the start asks for, as vLLM does; with "stubborn" it does not stop at SIGTERM.
STAND_IN = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "policy"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
    def log_message(self, *_):
        pass
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class StandIn(VLLMServer):
    """The server's life with another program in vLLM's place; `{port}` in the words becomes the port."""

    words: tuple[str, ...] = ("-c", STAND_IN, "{port}")

    def command(self) -> list[str]:
        """The other program's command line."""
        return [sys.executable, *(word.replace("{port}", str(self.port)) for word in self.words)]


def stand_in(tmp_path: Path, *words: str, **options: Any) -> StandIn:
    server = StandIn(model="policy", log=str(tmp_path / "logs" / "server.log"), **options)
    server.words = words or StandIn.words
    return server


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.05)


# --- starting -----------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_and_nothing_is_started(busy_port: int, tmp_path: Path) -> None:
    server = stand_in(tmp_path, port=busy_port)
    with pytest.raises(PortInUse, match=f"port {busy_port} on 127.0.0.1 is in use .*: choose server.port=0") as caught:
        server.start()
    assert caught.value.exit_code == 2
    assert server.process is None
    assert list(tmp_path.iterdir()) == []


def test_a_free_port_is_free() -> None:
    check_port("127.0.0.1", free_port("127.0.0.1"))


def test_the_command_line_holds_the_options_as_flags() -> None:
    server = VLLMServer("policy", "log", port=81, max_model_len=64, options={
        "enforce_eager": True, "max_num_seqs": 8, "disable_log_stats": False, "swap_space": None,
    }, seed=7)  # fmt: skip
    words, dtype = server.command(), "bfloat16" if has_fast_bf16("cpu") else "float32"
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert words[3:] == [
        "--served-model-name", "policy", "--host", "127.0.0.1", "--port", "81", "--seed", "7", "--model", "policy",
        "--dtype", dtype, "--max-model-len", "64", "--enforce-eager", "--max-num-seqs", "8",
    ]  # fmt: skip


def test_a_configs_seed_reaches_the_server_and_is_no_setting_of_it() -> None:
    """Runs that began before there was one compare `server` as a whole."""
    config = compose_config(SampleConfig, "api/vllm/trajectories", ["policy=M", "output=o.jsonl", "seed=5"])
    assert "seed" not in {**config.server, **config.server["options"]}
    words = build(config.server, seed=config.seed).command()
    assert words[words.index("--seed") + 1] == "5"


@pytest.mark.parametrize(("is_fast", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_engines_compute_in_what_the_machine_multiplies_fast(
    is_fast: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_fast_bf16", lambda kind: is_fast)
    assert "dtype" not in vars(VLLMServer("policy", "log")), "asked when it starts: a job that is done needs no torch"
    assert VLLMServer("policy", "log").dtype == OfflineClient("policy").dtype == expected
    assert DataParallelEngines(model="policy").dtype == expected
    assert (engine_dtype("bfloat16", {}), engine_dtype("auto", {"dtype": "half"})) == ("bfloat16", "half")


def test_the_server_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    environment = VLLMServer("policy", "log").environment()
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()


def test_the_controls_are_closed_unless_asked_for() -> None:
    assert "VLLM_SERVER_DEV_MODE" not in VLLMServer("policy", "log").environment()
    assert VLLMServer("policy", "log", has_controls=True).environment()["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_end_of_a_log_is_shown_without_what_its_libraries_leaked(tmp_path: Path) -> None:
    server = VLLMServer("policy", str(tmp_path / "log"))
    lines = ["Found ulimit of 1024: `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
             "EngineDeadError: it died", "nanobind: leaked 2 functions!", ' - leaked function "f"',
             " - ... skipped remainder", "See https://nanobind.readthedocs.io/"]  # fmt: skip
    server.log.write_text("\n".join(lines))
    assert server.tail(2).split("\n")[-1] == "  | EngineDeadError: it died"
    assert server.first_error() == ": EngineDeadError: it died"


def test_a_server_that_dies_at_once_is_explained_by_its_last_lines(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "-c", "import sys; print('first'); print('no such model'); sys.exit(3)")
    with pytest.raises(CannotStart) as caught:
        server.start()
    assert str(caught.value) == (
        f"the vLLM server died (exit code 3)\nthe end of {server.log}:\n  | first\n  | no such model"
    )
    assert caught.value.exit_code == 3


def test_the_first_error_is_told_though_much_noise_follows_it(tmp_path: Path) -> None:
    program = "print('(Worker) ERROR RuntimeError: 16'); print('KeyError: 5'); print('noise\\n' * 50); exit(1)"
    with pytest.raises(CannotStart, match=r"^the vLLM server died \(exit code 1\): RuntimeError: 16\n"):
        stand_in(tmp_path, "-c", program).start()


def test_a_server_that_never_answers_is_given_up_and_stopped(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "-c", "print('loading', flush=True); import time; time.sleep(60)", start_seconds=0.5)
    with pytest.raises(CannotStart, match=r"not healthy after 0.5 s:\n  . loading"):
        server.start()
    assert server.process is None


def test_a_port_that_does_not_speak_http_is_not_healthy(tmp_path: Path) -> None:
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "while True: c, _ = s.accept(); c.recv(1000); c.sendall(b'garbage\\r\\n\\r\\n'); c.close()"
    )
    with pytest.raises(CannotStart, match="not healthy after 1 s"):
        stand_in(tmp_path, "-c", program, "{port}", start_seconds=1.0).start()


# --- living and ending --------------------------------------------------------------------------------------


def test_nothing_stays_after_the_block(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server:
        assert server.is_alive()
        server.check()
        assert is_listening(server.port)
        assert server.process is not None
        group = server.process.pid
    assert not is_listening(server.port)
    assert group_members(group) == []
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "-c", STAND_IN, "{port}", "stubborn").start()
    assert server.process is not None
    group = server.process.pid
    server.stop(grace_seconds=0.3)
    assert group_members(group) == []


def test_children_that_a_dead_server_left_are_killed_too(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    server = stand_in(tmp_path, "-c", program)
    with pytest.raises(CannotStart):
        server.start()
    log = (tmp_path / "logs" / "server.log").resolve()
    wait_until(lambda: not any(os.path.realpath(path) == str(log) for path in Path("/proc").glob("[0-9]*/fd/1")), 5.0)


def test_a_server_that_has_died_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server:
        assert server.process is not None
        server.process.kill()
        server.process.wait(10)
        with pytest.raises(ServerGone, match=r"the vLLM server died \(exit code -9\)"):
            server.check()


def start_parent(tmp_path: Path, make_server: str) -> tuple[subprocess.Popen[str], int, int]:
    """A process that starts a server and waits; with the server's process id and port."""
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from espalier.sampling.server import VLLMServer
from tests.sampling.test_server import stand_in
with {make_server} as server:
    print(server.process.pid, server.port, flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert line, "the parent could not start the server"
    pid, port = map(int, line.split())
    return parent, pid, port


def test_the_server_goes_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent, pid, port = start_parent(tmp_path, f"stand_in(Path({str(tmp_path)!r}))")
    assert is_listening(port)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    wait_until(lambda: group_members(pid) == [] and not is_listening(port), 5.0)


def without_cut_end(text: str) -> str:
    """vLLM leaves out the bytes of a character that the end of the sample cut through."""
    return text.rstrip("\ufffd")


# --- the real one -------------------------------------------------------------------------------------------

REAL = {"max_model_len": 256, "options": {"enforce_eager": True, "max_num_seqs": 32}}


@pytest.mark.slow
@pytest.mark.server
def test_a_model_folder_that_kills_the_server_is_explained_by_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_model"}')
    server = VLLMServer(str(folder), str(tmp_path / "server.log"), **REAL)
    with pytest.raises(CannotStart, match=r"the vLLM server died \(exit code [^0]") as caught:
        server.start()
    assert "no_such_model" in str(caught.value)
    assert str(tmp_path / "server.log") in str(caught.value)


@pytest.mark.server
def test_token_ids_go_in_and_come_out(real_server: Any, tokenizer: Any) -> None:
    from espalier.sampling.requests import decode

    params = SamplingParams(n=8, temperature=1.0, max_tokens=40, return_logprobs=True)
    prompts = [tokenizer("Mia has 5 apples. Mia buys 3 more. How many apples now?\n").input_ids, [5, 6, 7]]

    async def ask(url: str) -> list[Any]:
        client = VLLMClient(url)
        await client.open()
        assert client.max_model_length == 256
        samples = [await client.sample(SampleRequest(str(i), "", ids), params) for i, ids in enumerate(prompts)]
        await client.close()
        return [sample for group in samples for sample in group]

    for sample in asyncio.run(ask(real_server.base_url)):
        assert 1 <= len(sample.token_ids) <= 40
        assert all(0 <= token < len(tokenizer) for token in sample.token_ids)
        assert len(sample.logprobs) == len(sample.token_ids)
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == tokenizer.eos_token_id)
        assert without_cut_end(decode(tokenizer)(sample.token_ids)) == without_cut_end(sample.text)


@pytest.mark.server
@pytest.mark.slow
def test_the_real_server_goes_with_a_parent_that_is_killed(tmp_path: Path, tiny_policy: Path) -> None:
    parent, pid, port = start_parent(
        tmp_path, f"VLLMServer({str(tiny_policy)!r}, {str(tmp_path / 'server.log')!r}, **{REAL!r})"
    )
    assert len(group_members(pid)) >= 1
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    wait_until(lambda: group_members(pid) == [] and not is_listening(port), 30.0)


def test_a_live_engine_of_one_device_works_in_one_process(tmp_path: Path) -> None:
    def words(**changes: Any) -> list[str]:
        return VLLMServer("model", str(tmp_path / "log"), **changes).command()

    flag = "--distributed-executor-backend"
    alone = words(has_controls=True)
    assert alone[alone.index(flag) + 1].endswith("UniProcExecutor")
    assert flag not in words(has_controls=False)
    assert flag not in words(has_controls=True, options={"tensor_parallel_size": 2})
    chosen = words(has_controls=True, options={"distributed_executor_backend": "mp"})
    assert chosen[chosen.index(flag) + 1] == "mp"
    assert VLLMServer("model", str(tmp_path / "log"), options={"dtype": "float32"}).dtype == "float32"


def test_a_live_engine_in_one_process_leaves_a_core_and_takes_no_more_than_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(**changes: Any) -> str | None:
        return VLLMServer("model", str(tmp_path / "log"), **changes).environment().get("OMP_NUM_THREADS")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(has_controls=True) == "7"
    assert threads(has_controls=False) is None
    assert threads(has_controls=True, options={"distributed_executor_backend": "mp"}) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(has_controls=True) == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert threads(has_controls=True) == "7"
