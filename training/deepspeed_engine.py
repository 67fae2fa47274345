"""The same engine over `deepspeed.initialize`: ZeRO 0 to 3, offload, on GPUs (nccl) or CPUs (gloo).

The YAML is DeepSpeed's own JSON; batch sizes and clipping are filled in here from the run's config. The
optimizer is ours (torch.optim) and the loop sets the learning rate, so that one schedule serves all engines; with
offload it runs on the CPU as it is (fused), where DeepSpeed's own would be compiled at its first use.
DeepSpeed averages gradients over ranks; losses are scaled by the number of ranks to make that a sum.

`tensor_parallel.autotp_size: N` cuts every layer over N neighbouring ranks (AutoTP). They read the same examples
(`training.loop_from_config.data_ranks`), so losses and counts are both N-fold in the sums over ranks and their quotient
stays.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from espalier.models.in_parts import is_part, loaded_in_parts
from espalier.models.inputs import network
from espalier.models.packing_check import packing_of
from espalier.models.precision import autocast, is_bf16
from espalier.runtime.distributed import device, is_main_rank, limit_all_groups, rank, wait_visibly, world_size
from espalier.training.deepspeed_library import library
from espalier.training.deepspeed_pieces import BadSettings as BadSettings
from espalier.training.deepspeed_pieces import check_optimizer, check_settings, held_pieces, spread
from espalier.training.engine import named_weights
from espalier.training.pieces import State, held_whole, persistent_buffers, trained_shapes
from espalier.training.shards import GatheredWeights, Shards
from espalier.training.weight_cutter import ZeroCutter


def tensor_parallel_size(settings: Mapping[str, Any] | None) -> int:
    """Over how many ranks each layer is cut; 1 without tensor parallelism. Raises BadSettings where that cannot be."""
    size = int(((settings or {}).get("tensor_parallel") or {}).get("autotp_size") or 1)
    if size == 1 or settings is None:
        return 1
    if world_size() % size:
        raise BadSettings(f"tensor_parallel.autotp_size {size} does not divide the {world_size()} ranks: start a "
                          f"multiple of {size}")  # fmt: skip
    stage = int(settings.get("zero_optimization", {}).get("stage", 0))
    if stage not in (1, 2):
        raise BadSettings(f"tensor_parallel.autotp_size {size} needs ZeRO stage 1 or 2, not {stage}: set "
                          "deepspeed.zero_optimization.stage=1")  # fmt: skip
    return size


def check_heads(model: Any, size: int) -> None:
    """Raise BadSettings where a layer has fewer heads of keys than ranks share it, so that one would have none."""
    heads = getattr(network(model).config.get_text_config(), "num_key_value_heads", None)
    if heads is not None and heads < size:
        raise BadSettings(f"tensor_parallel.autotp_size {size} leaves a rank without a head of keys, of which a layer "
                          f"has {heads}: set tensor_parallel.autotp_size={heads}, or deepspeed=zero3")  # fmt: skip


def check_head_is_whole(model: Any) -> None:
    """Raise BadSettings where tensor parallelism has cut the output head: log-probs need all of the vocabulary."""
    head = model.get_output_embeddings()
    if head is not None and getattr(head.weight, "ds_is_replaced_module", False):
        raise BadSettings("tensor_parallel cuts the output head, which log-probs need whole: set "
                          "deepspeed.tensor_parallel.preset_model=llama, or partition_config")  # fmt: skip


class DeepSpeedEngine:
    """Args: `settings`, DeepSpeed's JSON as a dict; `num_micro_batches` of one step on one rank."""

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        settings: dict[str, Any],
        *,
        micro_batch_size: int,
        num_micro_batches: int,
        max_grad_norm: float,
        precision: str,
    ):
        check_settings(settings)
        if (size := tensor_parallel_size(settings)) > 1:
            check_heads(model, size)
        deepspeed = library()
        self.device = device()
        run_settings = {
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": max_grad_norm,
            "torch_autocast": _autocast(precision),  # gradients are reduced in float32
        }
        try:
            self.model, self.optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config={**settings, **run_settings}
            )
        except (ValueError, deepspeed.runtime.zero.utils.ZeRORuntimeException) as error:
            raise BadSettings(f"DeepSpeed refuses its settings: {' '.join(str(error).split())}") from error
        limit_all_groups()
        self.ranks_a_layer = size
        self.is_tensor_parallel = self.ranks_a_layer > 1
        if self.is_tensor_parallel:
            check_head_is_whole(self.model.module)
        self.zero_stage = int(settings.get("zero_optimization", {}).get("stage", 0))
        check_optimizer(self.model.optimizer, self.zero_stage)
        _measure_packing(self.model)
        self.start_step(num_micro_batches)

    def start_step(self, num_micro_batches: int) -> None:
        """The number of micro-batches may differ from step to step."""
        self.num_left = num_micro_batches
        self.model.set_gradient_accumulation_boundary(num_micro_batches == 1)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch's loss []; the last of a step reduces them over the ranks."""
        if self.model.is_gradient_accumulation_boundary():
            wait_visibly("the last micro-batch of all ranks")
        self.model.backward(loss * world_size(), scale_wrt_gas=False)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()
            self.num_left -= 1
            self.model.set_gradient_accumulation_boundary(self.num_left == 1)

    def step(self, learning_rate: float) -> float:
        """Clip and update, on every rank its part; the norm before clipping."""
        if not self.model.is_gradient_accumulation_boundary():
            raise RuntimeError("a step with DeepSpeed needs as many calls of backward as start_step was given")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._grad_norm() if self.zero_stage == 0 else None
        self.model.step()
        return float(self.model.get_global_grad_norm() if norm is None else norm)

    def _grad_norm(self) -> torch.Tensor:
        """Of the reduced gradients, which stage 0 leaves whole on every rank and does not measure."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.model.module.parameters() if p.grad is not None])

    @cached_property
    def shards(self) -> Shards | None:
        """What ZeRO-3 cuts over the ranks; None where every rank holds all weights."""
        return Shards(self.model.module, library().zero.GatheredParameters) if self.zero_stage == 3 else None

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the model's own, on rank 0 alone; not where they are `shards`."""
        return named_weights(self.model.module) if is_main_rank() else {}

    @contextlib.contextmanager
    def computing_in(self, precision: str) -> Iterator[None]:
        """Have forward passes computed in bf16 or fp32, whichever of them the run has: DeepSpeed sets its own."""
        config = self.model._config
        before = config.torch_autocast_enabled
        config.torch_autocast_enabled = is_bf16(precision, self.device.type)
        try:
            with autocast(self.device, precision):
                yield
        finally:
            config.torch_autocast_enabled = before

    def save_model(self, folder: Path) -> None:
        """Write a standard folder from rank 0, which gathers ZeRO-3's weights for one file at a time; of a model with
        adapters peft's, with the adapters."""
        module = self.model.module
        if self.is_tensor_parallel:
            # Puts the parts of each layer together, in the precision of the weights whatever its name says.
            whole = self.model._consolidated_16bit_state_dict()
            if is_main_rank():
                module.save_pretrained(folder, state_dict=whole)
            return
        if self.shards is not None and not hasattr(module, "get_base_model"):
            GatheredWeights(self.shards, {}).save(module, folder)
            return
        kept = [value for value in module.parameters() if value.requires_grad]
        for layer in filter(None, (module.get_input_embeddings(), module.get_output_embeddings())):
            kept += layer.parameters()  # which peft saves with adapters that are on them
        with self.shards.whole(kept) if self.shards is not None else contextlib.nullcontext():
            if is_main_rank():
                state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
                module.save_pretrained(folder, state_dict=state)

    def discard(self) -> None:
        """Once all micro-batches have gone backward: DeepSpeed keeps its sums of gradients to itself, but leaves a step
        out, and all moments as they are, where their norm is not a number; so a gradient is made that, or, where
        gradients are offloaded and measured on their way to the CPU, their norms are."""
        if not self.model.is_gradient_accumulation_boundary():
            raise RuntimeError("with DeepSpeed only a whole step can be left out")
        if self.zero_stage == 0:
            self.model.module.zero_grad(set_to_none=True)
            return
        held = self.model.optimizer
        if getattr(held, "offload_optimizer", False) or getattr(held, "cpu_offload", False):
            held.norm_for_param_grads = dict.fromkeys(held.norm_for_param_grads, torch.tensor(float("nan")))
        else:
            first = next(parameter for parameter in self.model.module.parameters() if parameter.requires_grad)
            shape = getattr(first, "ds_shape", first.shape)
            library().utils.safe_set_full_grad(first, torch.full(shape, float("nan"), device=self.device))
        self.model.step()
        if self.model.was_step_applied():
            raise RuntimeError("DeepSpeed took a step that was to be left out")

    def save_state(self, folder: Path) -> None:
        """Every rank its pieces; with stage 0, where all ranks have the same, rank 0 alone."""
        if self.zero_stage or is_main_rank():
            self._state().save(folder, rank(), has_buffers=rank() < self.ranks_a_layer)

    def load_state(self, folder: Path) -> None:
        """What any engine wrote, on any number of ranks; with tensor parallelism with as many for a layer. Raises
        BadCheckpoint."""
        self._state().load(folder)
        if self.zero_stage:
            spread(self.model.optimizer, self.zero_stage)

    def _state(self) -> State:
        module, optimizer = self.model.module, self.model.optimizer
        held = held_whole(module)
        if self.zero_stage:
            names = {id(value): name for name, value in module.named_parameters()}
            held, optimizer = held_pieces(optimizer, self.zero_stage, names), optimizer.optimizer
        part = f"part-{rank() % self.ranks_a_layer:03d}-of-{self.ranks_a_layer:03d}/" if self.is_tensor_parallel else ""
        shapes, buffers = trained_shapes(module), persistent_buffers(module)
        return State(held, optimizer, shapes, buffers, part, is_flat=self.zero_stage > 0)


def cuts_weights(settings: Mapping[str, Any] | None) -> bool:
    """Say whether DeepSpeed's JSON cuts the weights over the ranks: ZeRO stage 3."""
    return bool((settings or {}).get("zero_optimization", {}).get("stage") == 3)


def loading(settings: Mapping[str, Any] | None, precision: str = "") -> AbstractContextManager[None]:
    """Have networks that are loaded within cut over the ranks, weight by weight, where `settings` cut weights; on every
    rank. `precision` of a network that is only read: in bf16 its linear layers are held so, cut or whole."""
    is_half = bool(precision) and is_bf16(precision, device().type)
    check_settings(settings or {})
    if not cuts_weights(settings):
        return loaded_in_parts(None, is_half=True) if is_half else contextlib.nullcontext()
    return loaded_in_parts(ZeroCutter(_read_only(settings or {})), is_half=is_half)


def _read_only(settings: Mapping[str, Any]) -> dict[str, Any]:
    zero = {key: value for key, value in settings["zero_optimization"].items() if key != "offload_optimizer"}
    own = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": settings.get("steps_per_print", 10)}
    return {**own, "zero_optimization": zero}


def cut_over_ranks(model: Any, settings: Mapping[str, Any], precision: str) -> Any:
    """Return a model that is only read, with its weights cut over the ranks as `settings` (ZeRO-3) say: each layer is
    gathered as it is used, so that every rank has to make as many passes. Its optimizer settings are left out."""
    read = {**_read_only(settings), "torch_autocast": _autocast(precision)}
    engine = library().initialize(model=model, config=read)[0]
    limit_all_groups()
    _measure_packing(engine)
    return engine


def _measure_packing(engine: Any) -> None:
    """Have all ranks measure how rows may be computed together, where that was not done on whole weights. What a module
    reads of another one's weights DeepSpeed gathers in passes of the engine alone, and here of its network."""
    held = [part._parameters for part in engine.module.modules() if hasattr(part._parameters, "_in_forward")]
    try:
        for parameters in held:
            parameters._in_forward = True
        packing_of(engine)
    finally:
        for parameters in held:
            parameters._in_forward = False


def whole_weights(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Have these weights whole within, on every rank, whether ZeRO-3 cuts them or not; not to be written to."""
    cut = [tensor for tensor in tensors if is_part(tensor)]
    return library().zero.GatheredParameters(cut) if cut else contextlib.nullcontext()


def _autocast(precision: str) -> dict[str, Any]:
    """DeepSpeed switches autocast of the caller's off."""
    return {"enabled": is_bf16(precision, device().type), "dtype": "bfloat16", "lower_precision_safe_modules": []}
