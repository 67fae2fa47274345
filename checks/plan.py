"""Which checks a config asks for: of its machine, its model, its task, its training and its engine, the cheap ones first.

Each program's config has a list of its own; what several share stands in `Case`, which loads the tokenizer and the
task once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from checks.machine import check_device, check_server_port, check_versions
from checks.report import Check, CheckFailed, Skipped
from checks.resources import (
    Need,
    available_memory,
    check_disk,
    check_memory,
    checkpoint_bytes,
    frozen,
    read,
    served,
    trained,
)
from checks.template import check_template
from data.records import Problem
from data.tasks.task import Task
from models.load import load_tokenizer
from runtime.entrypoint import build
from runtime.schemas import RLConfig, SampleConfig, TrainConfig
from training.guards import check_tokenizer, model_limits

Config = RLConfig | SampleConfig | TrainConfig


def checks_of(config: Config, has_engine: bool = True) -> list[Check]:
    """The checks of a program's config; without those that load networks and start engines unless `has_engine`."""
    case = Case(config)
    every = {RLConfig: _of_rl, SampleConfig: _of_sampling, TrainConfig: _of_training}[type(config)]
    return [check for check, is_costly in every(case) if has_engine or not is_costly]


def machine_checks() -> list[Check]:
    """Those that need no config."""
    return [Check("versions", check_versions), Check("device", lambda: check_device("fp32", "", needs_vllm=True))]


@dataclass(frozen=True)
class Case:
    """A config, and what several of its checks look at."""

    config: Any

    @property
    def policy(self) -> str:
        """The folder (or hub name) of the model that is trained or sampled."""
        return str(self.config.policy if isinstance(self.config, SampleConfig) else self.config.model["path"])

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's."""
        return load_tokenizer(self.policy)

    @cached_property
    def task(self) -> Task:
        """The config's."""
        task: Task = build(self.config.task)
        return task

    @cached_property
    def problems(self) -> list[Problem]:
        """Those that are sampled: of the split that is asked for, else of train."""
        requests = getattr(self.config, "requests", None) or {}
        return self.task.problems(str(read(requests, "split", "train")))

    # What every config has.

    def device(self) -> str:
        """See `check_device`."""
        config = self.config
        is_trained = not isinstance(config, SampleConfig)
        attention = str(read(config.model, "attention", "")) if is_trained else ""
        needs_vllm = bool(read(getattr(config, "server", None), "_target_", "")) or "engine" in self.client_kind
        return check_device(config.precision if is_trained else "fp32", attention, needs_vllm)

    @property
    def client_kind(self) -> str:
        """The class of the sampler, "" where there is none."""
        return str(read(getattr(self.config, "client", None), "_target_", "")).rpartition(".")[2]

    def check_tokenizer(self) -> str:
        """Fits the model's embeddings, pads and ends with tokens of its own."""
        limits = model_limits(self.policy, self.tokenizer)
        check_tokenizer(self.tokenizer, limits)
        return f"{len(self.tokenizer):,} tokens of {limits.vocabulary:,}, pads with {self.tokenizer.pad_token!r}"

    def memory(self) -> str:
        """See `check_memory`."""
        import torch

        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            return check_memory(self.needs(), free, "GPU memory")
        return check_memory(self.needs(), available_memory())

    def needs(self) -> list[Need]:
        """What is certain of the memory that the config takes."""
        config = self.config
        found = []
        if not isinstance(config, SampleConfig):
            is_divided, is_adapter = bool(config.deepspeed), bool(config.lora)
            found.append(trained("the policy", self.policy, is_adapter=is_adapter, is_divided=is_divided))
        if isinstance(config, RLConfig):
            if config.critic is not None:
                path = str(config.critic.model["path"])
                found.append(trained("the critic", path, is_adapter=False, is_divided=bool(config.deepspeed)))
            if config.kl.coefficient > 0 and not config.lora:
                found.append(frozen("the reference", self.policy))
            found += [frozen("a reward model", path) for path in model_paths([config.reward, config.advantage])]
        if isinstance(config, TrainConfig) and not config.lora:
            found += [frozen("the reference", path) for path in model_paths(config.objective)]
        return [*found, *self.engine_needs()]

    def engine_needs(self) -> list[Need]:
        """Of the engines that this config starts on this machine."""
        server, client = (getattr(self.config, name, None) for name in ("server", "client"))
        if read(server, "_target_", ""):
            node, number = server, int(read(server, "num_servers", 1))
        elif self.client_kind in ("OfflineClient", "LocalEnginesClient"):
            node, number = client, int(read(client, "num_engines", 1))
        else:
            return []
        return [served(self.policy, number, float(read(node, "kv_cache_gib", 1)))]

    def disk(self) -> str:
        """Room for checkpoints and models, or for samples."""
        config = self.config
        if isinstance(config, SampleConfig):
            return check_disk(config.output, 2**26)
        num_kept = config.keep_checkpoints + config.keep_best if config.save_every > 0 else 0
        return check_disk(config.output_dir, checkpoint_bytes(self.policy, num_kept))

    def template(self) -> str:
        """See `check_template`."""
        return check_template(self.task, self.tokenizer, self.problems)


def model_paths(node: Any) -> Iterator[str]:
    """The model folders that the components below a node are built from."""
    if isinstance(node, dict):
        if "_target_" in node and isinstance(node.get("path"), str):
            yield node["path"]
        for value in node.values():
            yield from model_paths(value)
    elif isinstance(node, list):
        for value in node:
            yield from model_paths(value)


def _shared(case: Case) -> list[tuple[Check, bool]]:
    cheap = [
        Check("versions", check_versions),
        Check("device", case.device),
        Check("memory", case.memory),
        Check("disk", case.disk),
        Check("tokenizer", case.check_tokenizer),
    ]
    return [(check, False) for check in cheap]
