"""The same engine over `deepspeed.initialize`: ZeRO 0 to 3, offload, on GPUs (nccl) or CPUs (gloo).

The YAML is DeepSpeed's own JSON; batch sizes and clipping are filled in here from the run's config. The
optimizer is ours (torch.optim) and the loop sets the learning rate, so that one schedule serves all engines; with
offload it runs on the CPU as it is (fused), where DeepSpeed's own would be compiled at its first use.
DeepSpeed averages gradients over ranks; losses are scaled by the number of ranks to make that a sum.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from runtime.distributed import device, is_main_rank, world_size
from training.engine import BadCheckpoint

TAG = "deepspeed"


class BadSettings(ValueError):
    """DeepSpeed refuses its JSON."""

    exit_code = 2


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
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed
        from deepspeed.runtime.zero.utils import ZeRORuntimeException

        # An operator of inference only, which DeepSpeed would compile (a minute, and a compiler) on CPUs.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.device = device()
        run_settings = {
            "train_micro_batch_size_per_gpu": micro_batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": max_grad_norm,
            # DeepSpeed switches the loop's own autocast off; gradients are reduced in float32.
            "torch_autocast": {
                "enabled": precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }
        try:
            self.model, self.optimizer, _, _ = deepspeed.initialize(
                model=model, optimizer=optimizer, config={**settings, **run_settings}
            )
        except (ValueError, ZeRORuntimeException) as error:
            raise BadSettings(f"DeepSpeed refuses its settings: {' '.join(str(error).split())}") from error
        # Frozen weights (all but the adapters of LoRA) stay out of checkpoints.
        self.has_frozen = any(not parameter.requires_grad for parameter in model.parameters())
        self.zero_stage = int(settings.get("zero_optimization", {}).get("stage", 0))

    def backward(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's gradients; the last of a step reduces them over the ranks."""
        self.model.backward(loss * world_size(), scale_wrt_gas=False)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()

    def step(self, learning_rate: float) -> float:
        """Clip and update, on every rank its part; the norm before clipping."""
        if not self.model.is_gradient_accumulation_boundary():
            raise RuntimeError("a step with DeepSpeed needs exactly num_micro_batches calls of backward")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._grad_norm() if self.zero_stage == 0 else None
        self.model.step()
        return float(self.model.get_global_grad_norm() if norm is None else norm)

    def _grad_norm(self) -> torch.Tensor:
        """Of the reduced gradients, which stage 0 leaves whole on every rank and does not measure."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.model.module.parameters() if p.grad is not None])

    def save_model(self, folder: Path) -> None:
        """Gather (ZeRO-3) and write a standard folder from rank 0."""
        import deepspeed

        module = self.model.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            if is_main_rank():
                state = {name: value.detach().cpu() for name, value in module.state_dict().items()}
                module.save_pretrained(folder, state_dict=state)

    def discard(self) -> None:
        """Not with DeepSpeed, which keeps its sums of gradients to itself."""
        raise BadSettings("on_nonfinite=skip cannot be had with DeepSpeed: set on_nonfinite=stop or deepspeed=none")

    def save_state(self, folder: Path) -> None:
        """DeepSpeed's own checkpoint, one part a rank."""
        self.model.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=self.has_frozen)

    def load_state(self, folder: Path) -> None:
        """What `save_state` wrote, on the same number of ranks."""
        found, _ = self.model.load_checkpoint(str(folder), tag=TAG, load_module_strict=not self.has_frozen)
        if found is None:
            raise BadCheckpoint(f"{folder}: DeepSpeed finds nothing to load there: choose another checkpoint")


def is_deepspeed_checkpoint(folder: Path) -> bool:
    """Whether `DeepSpeedEngine.save_state` wrote it."""
    return (folder / TAG).is_dir()


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 weights of a checkpoint of any ZeRO stage and any number of ranks, put together on the CPU.

    DeepSpeed's files are pickles: check the folder's manifest before.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    if not list((folder / TAG).glob("*zero_pp_rank_*optim_states.pt")):  # stage 0: every rank holds all of it
        stored = torch.load(folder / TAG / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True)
        return dict(stored["module"])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG))
