"""Plant one fault after another in reinforcement learning with a real engine, and see whether it is named at once.

    bash scripts/faults.sh rl [--clean 200]

A tiny policy whose head is made sharp (a trained one's log-probs are not all alike) learns against vLLM itself, in
bfloat16, from a reward that moves it in every iteration. Each fault is planted after one good iteration, where such
mistakes are made: in what reaches the engine, in what it is asked, in what comes back, in the tensors, in the reward,
in the step. It is caught where the very next probe stops the run under the right name, with the right exit code, and
with nothing saved. Then come the clean iterations, half of them at another temperature: any stop, and any warning of
drift, is a false alarm. Writes benchmarks/results/rl_faults.json.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

import espalier.rl.experience
from benchmarks.processes.forked import ROOT
from benchmarks.result import count, write_result
from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.rewards.score import Score
from espalier.rl.probes import checks as probes
from espalier.rl.probes.checks import ProbeFailed
from espalier.rl.trainer import Trainer
from espalier.rl.trainer_from_config import make_trainer
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.child_process import group_members
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient
from espalier.sampling.weight_digest import digest

HOW = "bash scripts/faults.sh rl"
SETTINGS = """rollout.num_problems=4 rollout.group_size=4 update.minibatch_size=16 update.micro_batch_size=16
    params.max_tokens=40 update.learning_rate=3e-4
    update.warmup_steps=0 evaluation.every=0 checkpoints.save_every=1 engine.concurrency=16 task.num_train=400
    task.num_dev=20 task.num_test=20
    server.max_model_len=256 server.options.max_num_seqs=32 server.num_threads=1"""


def prepare(folder: Path) -> str:
    """Return the policy's folder."""
    rows = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200).demonstrations("train")
    texts = [row.prompt + row.completion for row in rows]
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 320, "max_length": 512, "seed": 0}
    build_tiny(folder / "tiny", texts, **shape)
    path = folder / "tiny" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 6
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder / "tiny")


class EvenTokens:
    """The share of a response's tokens with even ids: no two rollouts are worth the same, so every step moves."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score each."""
        return [
            Score(sum(t % 2 == 0 for t in row.response_ids) / max(1, len(row.response_ids))) for row in trajectories
        ]


class Bench:
    """One server and, on it, one run after another."""

    def __init__(self, folder: Path):
        self.folder, self.policy = folder, prepare(folder)
        self.tokenizer = load_tokenizer(self.policy)
        self.server: VLLMServer | None = None
        self.num_runs = 0

    def config(self, run: Path, *more: str) -> RLConfig:
        """Of a run in the folder `run`."""
        words = [*SETTINGS.split(), f"model.path={self.policy}", f"output_dir={run}", *more]
        return compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", words)

    def shown(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row without this machine's paths, printed."""
        text = json.dumps(row).replace(str(self.folder), "FOLDER").replace(f"{ROOT}/", "")
        print(text, file=sys.stderr, flush=True)
        found: dict[str, Any] = json.loads(text)
        return found

    def new_run(self) -> Path:
        """Return a folder."""
        self.num_runs += 1
        return self.folder / f"run-{self.num_runs}"

    def trainer(self, run: Path, *more: str) -> Trainer:
        """Make a run, on the server that is running or on a new one."""
        config = self.config(run, *more)
        run.mkdir(exist_ok=True)
        if self.server is None:
            server: VLLMServer = build({**config.server, "log": str(self.folder / "server.log")})
            self.server = server.start()
        client: VLLMClient = build(config.client, seed=0)
        client.base_url = self.server.base_url
        torch.manual_seed(0)
        trainer = make_trainer(config, self.tokenizer, self.server, client)
        trainer.rollout_source.reward = EvenTokens()
        return trainer


# --- faults: each takes a good run and spoils it from now on ----------------------------------------------------------


def tamper_with_stream(trainer: Trainer, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """The engine reads other tensors than the trainer means to send."""
    stream: Any = trainer.delivery.sync._group.stream
    send = stream.send

    def changed(kinds: Any, weights: Any) -> dict[str, str]:
        rows = [(name, value.detach()) for name, value in weights]
        send(kinds, [(name, change(name, value)) for name, value in rows])
        return {name: digest(value.to(kinds[name][1])) for name, value in rows}

    stream.send = changed


def policy_now(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of its weights."""
    weights = trainer.policy.engine.model.state_dict()
    return {name: value.detach().clone().contiguous() for name, value in weights.items()}


def nothing_delivered(trainer: Trainer) -> None:
    """The engine says yes and reads nothing."""
    (engine,) = cast(list[Any], trainer.delivery.sync.engines)
    stream: Any = trainer.delivery.sync._group.stream

    async def receive(key: str, number: int) -> Any:
        return [{}]

    def send(kinds: Any, weights: Any) -> dict[str, str]:
        return {name: digest(value.to(kinds[name][1])) for name, value in weights}

    engine.receive, stream.send = receive, send


def one_tensor_stale(trainer: Trainer) -> None:
    """One tensor is as it was in the last delivery."""
    name = "model.layers.1.mlp.down_proj.weight"
    old = policy_now(trainer)[name]
    tamper_with_stream(trainer, lambda changed, value: old if changed == name else value)


def one_step_old(trainer: Trainer) -> None:
    """Every delivery is the one before."""
    old = policy_now(trainer)
    tamper_with_stream(trainer, lambda name, value: old[name])


def stale_cache(trainer: Trainer) -> None:
    """The prefix cache outlives the delivery."""
    (engine,) = cast(list[Any], trainer.delivery.sync.engines)

    async def keep() -> None:
        return None

    engine.reset_cache = keep


def asked_otherwise(
    change_params: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    change_request: Callable[[SampleRequest], SampleRequest] = lambda request: request,
    change_sample: Callable[[Sample], Sample] = lambda sample: sample,
) -> Callable[[Trainer], None]:
    """Make what reaches the engine, or comes back, differ from what the trainer believes."""

    def plant(trainer: Trainer) -> None:
        sample = trainer.rollout_source.sampler.client.sample

        async def changed(request: SampleRequest, params: SamplingParams) -> list[Sample]:
            found = await sample(change_request(request), change_params(params))
            return [change_sample(one) for one in found]

        trainer.rollout_source.sampler.client.sample = changed  # type: ignore[method-assign]

    return plant


def shifted(sample: Sample) -> Sample:
    """Shift every log-prob one token late."""
    assert sample.logprobs is not None
    return replace(sample, logprobs=[*sample.logprobs[-1:], *sample.logprobs[:-1]])


def double_bos(trainer: Trainer) -> None:
    """The engine reads one more of the token that texts begin with."""
    first = trainer.rollout_source.sampler.tokenizer.eos_token_id
    asked_otherwise(change_request=lambda request: replace(request, prompt_ids=[first, *request.prompt_ids]))(trainer)


def pads_otherwise(change: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]) -> Callable[[Trainer], None]:
    """Lay the tensors out otherwise."""

    def plant(trainer: Trainer) -> None:
        espalier.rl.experience.pad_rows = lambda *arguments: change(PAD_ROWS(*arguments))  # type: ignore[assignment]

    return plant


PAD_ROWS = espalier.rl.experience.pad_rows


def on_the_left(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Pad ids and attention mask on the left, the response mask not."""
    ids, attention_mask, response_mask = tensors
    lengths = attention_mask.sum(-1)
    places = [ids.shape[1] - int(length) for length in lengths]
    moved = [torch.stack([torch.roll(row, by) for row, by in zip(one, places, strict=True)]) for one in tensors[:2]]
    return moved[0], moved[1], response_mask


def without_end(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """End every response's mask one token early."""
    ids, attention_mask, response_mask = tensors
    last = attention_mask.sum(-1, keepdim=True) - 1
    return ids, attention_mask, response_mask.scatter(1, last, False)


def reward_nan(trainer: Trainer) -> None:
    """One reward of the iteration is no number."""
    reward = trainer.rollout_source.reward
    trainer.rollout_source.reward = lambda rows: [Score(float("nan")), *reward(rows)[1:]]


def learning_rate_of_one(trainer: Trainer) -> None:
    """The step is 3,000 times too large."""
    trainer.update.config.update.learning_rate = 1.0


def engine_dies(server: VLLMServer) -> Callable[[Trainer], None]:
    """Kill the engine's process with the third answer."""

    def plant(trainer: Trainer) -> None:
        sample, count = trainer.rollout_source.sampler.client.sample, 0

        async def counted(request: SampleRequest, params: SamplingParams) -> list[Sample]:
            nonlocal count
            count += 1
            if count == 3:
                assert server.process is not None
                for pid in group_members(server.process.pid):
                    if pid != server.process.pid and "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)
            return await sample(request, params)

        trainer.rollout_source.sampler.client.sample = counted  # type: ignore[method-assign]

    return plant


@dataclass(frozen=True)
class Fault:
    """`name` for the record, `kind` as it has to be named, `says` a part of what the message says besides."""

    name: str
    kind: str
    plant: Callable[[Trainer], None]
    settings: tuple[str, ...] = ()
    exit_code: int = 1
    says: str = ""


OLD = "1 version old"  # and not merely another tensor
FAULTS = [
    Fault("no tensor is delivered", probes.WEIGHTS, nothing_delivered),
    Fault("one tensor is stale", probes.WEIGHTS, one_tensor_stale, says=OLD),
    Fault("weights are one step old", probes.WEIGHTS, one_step_old, says=OLD),
    Fault("weights are one step of size 1e-7 old", probes.WEIGHTS, one_step_old, ("update.learning_rate=1e-7",),
          says=OLD),
    Fault("the prefix cache is stale", probes.CACHE, stale_cache),
    Fault("the engine samples at temperature 0.7, the trainer scores at 1", probes.TEMPERATURE,
          asked_otherwise(lambda params: replace(params, temperature=0.7))),
    Fault("the engine samples at temperature 1, the trainer scores at 0.7", probes.TEMPERATURE,
          asked_otherwise(lambda params: replace(params, temperature=1.0)), ("params.temperature=0.7",)),
    Fault("the engine cuts at top-p 0.9", probes.TOP_P, asked_otherwise(lambda params: replace(params, top_p=0.9))),
    Fault("log-probs are off by one token", probes.SHIFT, asked_otherwise(change_sample=shifted)),
    Fault("the engine reads a doubled BOS", probes.BOS, double_bos),
    Fault("rows are padded on the left", probes.PAD, pads_otherwise(on_the_left)),
    Fault("the stop token is missing from the mask", probes.STOP, pads_otherwise(without_end)),
    Fault("a reward is NaN", probes.REWARD, reward_nan),
    Fault("KL explodes", probes.KL, learning_rate_of_one),
]  # fmt: skip


def after_one_iteration(trainer: Trainer, plant: Callable[[Trainer], None]) -> list[int]:
    """Plant when iteration 1 begins; the iterations that ended."""
    iterate, ended = trainer.iterate, []

    def planted(iteration: int) -> dict[str, float]:
        if iteration == 1:
            plant(trainer)
        values = iterate(iteration)
        ended.append(iteration)
        return values

    trainer.iterate = planted  # type: ignore[method-assign]
    return ended


def saved(run: Path) -> list[str]:
    """Return the checkpoints of a run."""
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def try_fault(bench: Bench, fault: Fault) -> dict[str, Any]:
    """Make one run of three iterations with the fault from the second on."""
    run = bench.new_run()
    trainer = bench.trainer(run, "num_iterations=3", *fault.settings)
    ended = after_one_iteration(trainer, fault.plant)
    found: dict[str, Any] = {"fault": fault.name, "kind": fault.kind, "told": "", "exit_code": 0}
    try:
        trainer.run()
    except (ProbeFailed, ServerGone) as error:
        found |= {"told": str(error), "exit_code": error.exit_code}
    finally:
        espalier.rl.experience.pad_rows = PAD_ROWS
    told = found["told"]
    is_named = told.startswith(f"{fault.kind}: ") and fault.says in told and found["exit_code"] == fault.exit_code
    found["at_first_probe"] = ended == [0]
    found["nothing_spoilt"] = saved(run) == ["step-00000001"]
    found["caught"] = is_named and found["at_first_probe"] and found["nothing_spoilt"]
    return found


def try_crash(bench: Bench) -> dict[str, Any]:
    """Return the engine dies in mid-rollout; a new one goes on from the checkpoint."""
    assert bench.server is not None
    fault = Fault("the engine is killed in mid-rollout", probes.CRASH, engine_dies(bench.server), exit_code=3)
    found = try_fault(bench, fault)
    found["shows_the_log"] = "the end of " in found["told"] and "\n  | " in found["told"]
    bench.server.stop()
    bench.server = None
    run = bench.folder / f"run-{bench.num_runs}"
    trainer = bench.trainer(run, "num_iterations=2")
    ended: list[int] = after_one_iteration(trainer, lambda trainer: None)
    trainer.run()
    found["resumed"] = ended == [1]
    found["caught"] = found["caught"] and found["shows_the_log"] and found["resumed"]
    return found


class Warnings(logging.Handler):
    """What the probes warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.rows: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.rows.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Warnings]:
    """Gathers the warnings of rl/."""
    handler = Warnings()
    logging.getLogger("rl").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("rl").removeHandler(handler)


def try_clean(bench: Bench, temperature: float, count: int) -> dict[str, Any]:
    """Return `count` good iterations: alarms (one ends the run), warnings, and the largest of every measure."""
    run = bench.new_run()
    more = (f"num_iterations={count}", f"params.temperature={temperature}", "checkpoints.save_every=0")
    trainer = bench.trainer(run, *more)
    ended = after_one_iteration(trainer, lambda trainer: None)
    alarm = ""
    with listening() as heard:
        try:
            trainer.run()
        except (ProbeFailed, ServerGone) as error:
            alarm = str(error)
    rows = _metrics(run)
    names = ("gap_mean", "gap_p99", "gap_bias", "gap_k3", "ratios_outside", "surprise", "canary_gap", "policy_moved")
    worst = {name: max(abs(row[f"engine/{name}"]) for row in rows) for name in names}
    reward = [rows[0]["rollout/reward"], rows[-1]["rollout/reward"]]
    return {"temperature": temperature, "probes": len(ended), "alarm": alarm, "warnings": heard.rows[:5],
            "num_warnings": len(heard.rows), "worst": worst, "reward": reward}  # fmt: skip


def _metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "engine/gap_mean" in row]


def main() -> None:
    """Plant, look, write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--only", default="", help="faults whose name holds this; nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    bench = Bench(Path(tempfile.mkdtemp(prefix="rl-faults-")))
    try:
        chosen = [fault for fault in FAULTS if arguments.only in fault.name]
        found = [bench.shown(try_fault(bench, fault)) for fault in chosen]
        halves = (arguments.clean // 2, arguments.clean - arguments.clean // 2)
        temperatures = zip((1.0, 0.7), halves, strict=True)
        clean = [bench.shown(try_clean(bench, t, count)) for t, count in temperatures if count]
        if arguments.only in "the engine is killed in mid-rollout":
            if bench.server is None:
                bench.trainer(bench.new_run())
            found.append(bench.shown(try_crash(bench)))
    finally:
        if bench.server is not None:
            bench.server.stop()
    shutil.rmtree(bench.folder)
    seconds = round(time.monotonic() - began, 1)
    if not arguments.only:
        detail = {"faults": found, "clean": clean, "seconds": seconds, "limits": asdict(RLConfig().probes)}
        print(write_result("rl_faults", figures(found, clean, arguments.clean), detail))


def figures(found: Sequence[dict[str, Any]], clean: Sequence[dict[str, Any]], num_clean: int) -> dict[str, Any]:
    """Counts: faults that were caught, false alarms and clean probes."""
    caught = sum(row["caught"] for row in found)
    alarms = sum(bool(row["alarm"]) + row["num_warnings"] for row in clean)
    probed = sum(row["probes"] for row in clean)

    return {
        "planted_faults_caught": count(caught, len(found), f"of {len(found)} faults", how=HOW),
        "false_alarms": count(alarms, 0, f"in {num_clean} clean probes", how=HOW, better="lower"),
        "clean_probes": count(probed, num_clean, "probes", how=HOW),
    }


if __name__ == "__main__":
    main()
