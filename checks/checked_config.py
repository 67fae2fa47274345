"""A program's config and what its checks look at: every method is a check, and says in a line what it found.

The tokenizer, the task, its problems and the examples are loaded once. A check raises CheckFailed, Skipped or the
error of the program itself.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.checks.check import CheckFailed, Skipped
from espalier.checks.machine import check_device
from espalier.checks.plan_gpu import check_plan, plan_of
from espalier.checks.recipe import (
    SMALLEST,
    engine_name,
    kind_of,
    node_here,
    num_gpus,
    parameters_of,
    preset,
    rate_of,
)
from espalier.checks.rehearsal import rehearse_training
from espalier.checks.resources import (
    Need,
    available_memory,
    check_disk,
    check_memory,
    checkpoint_bytes,
    frozen,
    served,
    setting_of,
    trained,
)
from espalier.checks.template import check_template
from espalier.data.examples.stored_examples import StoredExamples
from espalier.data.prompt_window import fit_window
from espalier.data.records import BadInput, Problem
from espalier.data.tasks.gold_check import check_golds
from espalier.data.tasks.task import Task
from espalier.models.load import (
    check_model_folder,
    config_end_ids,
    generation_end_ids,
    load_end_ids,
    load_tokenizer,
    max_length_of,
)
from espalier.models.packing_check import packing_of
from espalier.models.tokenizer_checks import check_same_tokenizer, check_tokenizer, model_limits, stop_token_faults
from espalier.rl.combinations import check_combinations, reads_start
from espalier.rl.engines_from_config import make_client
from espalier.rl.losses import VALUE_RANGES
from espalier.rl.memory_of_run import read_networks
from espalier.runtime.entrypoint import build, find_component
from espalier.runtime.run_dir import as_begun, check_run_dir
from espalier.runtime.schemas import RLConfig, SampleConfig, TrainConfig
from espalier.sampling.engine_arguments import engine_dtype
from espalier.training.deepspeed_engine import cuts_weights
from espalier.training.loop_from_config import load_data
from espalier.training.memory_of_run import NoPlan, device_bytes, model_nodes, model_paths
from espalier.training.predict import find_checkpoints

log = logging.getLogger(__name__)

_WITH_ENGINES = ("OfflineClient", "DataParallelEngines", "RayEngines")


@dataclass(frozen=True)
class CheckedConfig:
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
        return self.task.problems(str(setting_of(requests, "split", "train")))

    # What every config has.

    def device(self) -> str:
        """See `check_device`."""
        config = self.config
        is_trained = not isinstance(config, SampleConfig)
        attention = str(setting_of(config.model, "attention", "")) if is_trained else ""
        needs_vllm = (
            bool(setting_of(getattr(config, "server", None), "_target_", "")) or self.client_kind in _WITH_ENGINES
        )
        return check_device(config.precision if is_trained else "fp32", attention, needs_vllm)

    @property
    def is_chat_api(self) -> bool:
        """Whether nothing of the config's runs on this machine."""
        return self.client_kind == "OpenAIChatClient"

    @property
    def client_kind(self) -> str:
        """The class of the sampler, "" where there is none."""
        return str(setting_of(getattr(self.config, "client", None), "_target_", "")).rpartition(".")[2]

    def check_tokenizer(self) -> str:
        """Fits the model's embeddings, pads and ends with tokens of its own."""
        limits = model_limits(self.policy, self.tokenizer)
        check_tokenizer(self.tokenizer, limits)
        return f"{len(self.tokenizer):,} tokens of {limits.vocabulary:,}, pads with {self.tokenizer.pad_token!r}"

    def agreeing_tokenizers(self) -> str:
        """Check that the other networks of the run read the policy's own tokens.

        Raises Skipped where there are none, and BadInput where a tokenizer is another one.
        """
        config = self.config
        nodes = [node for node in model_nodes([config.reward, config.advantage]) if not _reads_texts(node)]
        paths = [node["path"] for node in nodes if node["path"] != self.policy]
        if config.critic is not None and str(config.critic.model["path"]) != self.policy:
            paths.append(str(config.critic.model["path"]))
        if config.implicit_reward is not None and str(config.implicit_reward.model["path"]) != self.policy:
            paths.append(str(config.implicit_reward.model["path"]))
        if not paths:
            raise Skipped("no other network reads the policy's tokens")
        for path in dict.fromkeys(paths):
            check_same_tokenizer(self.tokenizer, path, "network")
        return f"the policy's is that of {', '.join(dict.fromkeys(paths))}"

    def size(self) -> str:
        """Say which preset of conf/size/ the model's size has, for the GPUs here, beside what the config sets."""
        config, parameters, kind = self.config, parameters_of(self.policy), kind_of(self.config)
        ranks = setting_of(config.launcher, "num_ranks", 0) or num_gpus()
        if not kind:
            raise Skipped("conf/size/ has no preset for this objective")
        rate = config.update.learning_rate
        try:
            words = preset(kind, parameters, ranks, bool(config.lora), node_here())
        except BadInput as error:
            fitting = f"none: {error}"
        else:
            fitting, usual = " ".join(words), rate_of(words[0])
            if parameters >= SMALLEST and not usual / 9.5 < rate < usual * 9.5:
                log.warning("update.learning_rate is %.3g times that of the preset, %g: set %s, or a rate near that",
                            rate / usual, usual, words[0])  # fmt: skip
        return (f"{parameters / 1e9:.3g}B parameters, {ranks} rank{'s' * (ranks > 1)}: the preset is {fitting}; here "
                f"update.learning_rate={rate:g} deepspeed={engine_name(config.deepspeed)}"
                )  # fmt: skip

    def stop_tokens(self) -> str:
        """Check that tokenizer, configurations and chat template name one end of a response.

        Raises CheckFailed where they do not.
        """
        ends = load_end_ids(self.policy)
        faults = stop_token_faults(self.tokenizer, config_end_ids(self.policy), generation_end_ids(self.policy) or [])
        if faults:
            raise CheckFailed(f"{self.policy}: {'; '.join(faults)}")
        tokens = self.tokenizer.convert_ids_to_tokens(ends or [self.tokenizer.eos_token_id])
        return f"a response ends with {' or '.join(map(repr, tokens))}"

    def golds(self) -> str:
        """Check that the task's grader accepts the task's own golds, and rejects changed ones.

        Raises CheckFailed where it does not.
        """
        found = check_golds(self.task, self.problems)
        if not found.is_sound:
            raise CheckFailed(f"{found.line}: set task.kind to the kind of this task's answers (docs/grading.md)")
        return found.line

    def critic(self) -> str:
        """Return what the settings of rewards, critic, schedules and estimator say of one another."""
        check_combinations(self.config)
        if self.config.critic is None:
            return "settings fit together; no critic"
        low, high = VALUE_RANGES[self.config.critic.form]
        return f"settings fit together; the critic says values from {low:g} to {high:g}"

    def memory(self) -> str:
        """See `check_memory`, and `check_plan` where the engine sleeps, which raise CheckFailed. Raises Skipped where
        nothing of the config takes memory."""
        import torch

        if isinstance(self.config, RLConfig) and self.config.engine.sleeps:
            try:
                return check_plan(*plan_of(self.config, device_bytes()))
            except NoPlan as error:
                raise Skipped(str(error)) from None
        if not self.needs():
            raise Skipped("no network and no engine of this config's own")
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            return check_memory(self.needs(), free, "GPU memory")
        return check_memory(self.needs(), available_memory())

    def needs(self) -> list[Need]:
        """Return what is certain of the memory that the config takes."""
        config = self.config
        found = []
        if not isinstance(config, SampleConfig):
            is_divided, is_adapter = bool(config.deepspeed), bool(config.lora)
            found.append(trained("the policy", self.policy, is_adapter=is_adapter, is_divided=is_divided))
        if isinstance(config, RLConfig):
            is_zero3 = cuts_weights(config.deepspeed)
            if config.critic is not None:
                path = str(config.critic.model["path"])
                found.append(trained("the critic", path, is_adapter=False, is_divided=bool(config.deepspeed)))
            if config.implicit_reward is not None:
                path = str(config.implicit_reward.model["path"])
                found.append(trained("the implicit reward", path, is_adapter=False, is_divided=bool(config.deepspeed)))
            if reads_start(config) and not config.lora:
                found.append(frozen("the reference", self.policy, is_divided=is_zero3 and config.kl.kind != "full"))
            found += [frozen("a reward model", path, is_divided=is_cut and is_zero3)
                      for path, is_cut in read_networks(config)]  # fmt: skip
        if isinstance(config, TrainConfig) and not config.lora:
            found += [frozen("the reference", path) for path in model_paths(config.objective)]
        return [*found, *self.engine_needs()]

    def engine_needs(self) -> list[Need]:
        """Of the engines that this config starts on this machine."""
        server, client = (getattr(self.config, name, None) for name in ("server", "client"))
        if setting_of(server, "_target_", ""):
            node, number = server, 1
        elif self.client_kind in _WITH_ENGINES and not setting_of(client, "address", ""):  # else they are a cluster's
            node, number = client, int(setting_of(client, "num_engines", 1))
        else:
            return []
        return [
            served(
                self.policy,
                number,
                float(setting_of(node, "kv_cache_gib", 1)),
                engine_dtype(str(setting_of(node, "dtype", "auto")), setting_of(node, "options", None) or {}),
            )
        ]

    def disk(self) -> str:
        """Check for room for checkpoints and models, or for samples, in a folder or file that the program would take.

        Raises CheckFailed where there is too little or the output is a folder, and BadConfig where the program would
        not take the folder.
        """
        config = self.config
        if isinstance(config, SampleConfig):
            if Path(config.output).is_dir() and not config.policies:
                raise CheckFailed(f"output={config.output} is a folder: name a file")
            return check_disk(config.output, 2**26)
        if getattr(config, "mode", "train") == "train":
            check_run_dir(config.output_dir, as_begun(config))
        num_kept = config.checkpoints.keep + config.checkpoints.keep_best if config.checkpoints.save_every > 0 else 0
        return check_disk(config.output_dir, checkpoint_bytes(self.policy, num_kept))

    def template(self) -> str:
        """See `check_template`."""
        return check_template(self.task, self.tokenizer, self.problems)

    def requests(self) -> str:
        """Count the requests. Raises CheckFailed where there are none."""
        requests = build(self.config.requests).load(self.task, self.tokenizer)
        if not requests:
            raise CheckFailed("there is nothing to ask: look at requests")
        return f"{len(requests):,} of {self.config.params['n']} samples each"

    def client(self) -> str:
        """Return client and server are a pair that takes new weights."""
        make_client(self.config)
        return f"{self.client_kind}, which takes new weights"

    def fits_window(self) -> str:
        """Count the problems that leave room for a response in the window. Raises Skipped where that is unknown."""
        config = self.config
        if self.is_chat_api:
            raise Skipped("a chat API says its window itself")
        window = setting_of(config.server, "max_model_len", 0) or setting_of(config.client, "max_model_len", 0)
        window = window or max_length_of(self.policy)
        if not window:
            raise Skipped("the engine that runs says its window itself")
        fit = fit_window(
            self.task, self.tokenizer, "train", self.problems, int(window), int(config.params["max_tokens"])
        )
        fit.check()
        return f"{len(fit.kept)} of {fit.total} problems fit {window} tokens"

    def packing(self) -> str:
        """See `models.packing_check`. Raises CheckFailed where the layout packs rows and the network may not."""
        check = packing_of(build(self.config.model))
        if self.has_forced_layout and check.choice != "packed":
            raise CheckFailed(f"update.layout={self.config.update.layout}: {check.reason}: set update.layout=auto")
        return (
            check.reason or f"rows are packed: they change one another by {check.leak:.1e} (rounding {check.noise:.1e})"
        )

    @property
    def has_forced_layout(self) -> bool:
        """Whether the config packs rows, whatever the network says."""
        return isinstance(self.config, TrainConfig) and self.config.update.layout in ("packed", "shared")

    @cached_property
    def examples(self) -> tuple[StoredExamples, Sequence[Any]]:
        """(training examples, evaluation examples)."""
        return load_data(self.config, self.tokenizer)

    def check_examples(self) -> str:
        """Past the guards of `training.guards`."""
        examples, held_out = self.examples
        return f"{len(examples)} of kind {type(examples[0]).__name__}, {len(held_out)} to evaluate"

    def checkpoints(self) -> str:
        """Return those that are to be predicted with are there."""
        config = self.config
        found = find_checkpoints(config.predict.checkpoints, Path(config.output_dir), self.policy)
        for checkpoint in found:
            check_model_folder(checkpoint.path)
        return f"{', '.join(checkpoint.name for checkpoint in found)} to predict with"

    def step(self) -> str:
        """See `rehearse_training`."""
        return rehearse_training(self.config, self.tokenizer, self.examples[0])


def _reads_texts(node: dict[str, Any]) -> bool:
    """Say whether a component is given texts, which it reads in tokens of its own."""
    return bool(getattr(find_component(node["_target_"]), "reads_texts", False))
