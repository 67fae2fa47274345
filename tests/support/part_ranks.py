"""Networks that are cut as they are read, for `test_cut_loading.py`: `part_ranks.py FOLDER NAME ...`, behind a
launcher. `FOLDER/NAME` are model folders."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.models.in_parts import is_part, whole_shape
from espalier.models.load import BadModel, load_policy, load_reference
from espalier.models.packing_check import packing_of
from espalier.models.scalar_head import load_critic, load_process_reward, rescale_head
from espalier.rl.training_engines import make_training_engine
from espalier.runtime.distributed import barrier, is_main_rank, process_group, rank, world_size
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import RLConfig
from espalier.training.deepspeed_engine import cut_over_ranks, loading, whole_weights
from espalier.training.reference_logprobs import weights_digest

IDS = torch.arange(6, 30).view(2, 12)


def assert_parts(model: Any, whole: Any) -> None:
    """No parameter of `model` is whole, their parts are a share, and all else is what `whole` has."""
    own, expected = dict(model.named_parameters()), dict(whole.named_parameters())
    assert list(own) == list(expected)
    for name, value in own.items():
        assert is_part(value), name
        assert value.numel() == 0, name
        assert whole_shape(value) == expected[name].shape, name
        assert value.ds_tensor.numel() <= expected[name].numel() // world_size() + 1, name  # type: ignore[attr-defined]
    buffers = dict(whole.named_buffers())
    for name, value in model.named_buffers():
        assert torch.equal(value, buffers[name]), name
    assert [type(one).__name__ for one in model.modules()] == [type(one).__name__ for one in whole.modules()]


def assert_weights(model: Any, whole: Any) -> None:
    """Gathered one by one they are the whole ones, to the last bit or, in bf16, rounded."""
    for (name, value), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        with whole_weights([value]):
            assert torch.equal(value, other.to(value.dtype)), name


def check_training(config: RLConfig, path: Path, folder: Path) -> None:
    """Loaded in parts a network is, computes and saves what a whole one does."""
    whole = load_policy(str(path))
    with loading(config.deepspeed):
        model: Any = load_policy(str(path))
    assert_parts(model, whole)
    assert_weights(model, whole)
    engine = make_training_engine(config, model, config.optimizer, 1e-3, 1.0)
    assert packing_of(model) == packing_of(whole)
    with torch.no_grad():
        found, wanted = engine.model(IDS).logits, whole(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    engine.save_model(folder / f"saved {path.name}")
    if is_main_rank():
        whole.save_pretrained(folder / f"expected {path.name}")
        own, other = ({file.name: file.read_bytes() for file in (folder / f"{kind} {path.name}").iterdir()}
                      for kind in ("saved", "expected"))  # fmt: skip
        assert own.keys() == other.keys()
        assert [name for name in own if own[name] != other[name]] == []
    barrier()


def check_reference(config: RLConfig, path: Path) -> None:
    """In bf16 a frozen network says, to the last bit, what a float32 one does in autocast."""
    assert config.deepspeed is not None
    whole = load_reference(str(path))
    with loading(config.deepspeed, "bf16"):
        model = load_reference(str(path))
    assert_parts(model, whole)
    assert_weights(model, whole)
    layer: Any = model.model.layers[0]
    assert layer.self_attn.q_proj.weight.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight.dtype == torch.float32
    engine = cut_over_ranks(model, config.deepspeed, "bf16")
    assert packing_of(model).choice == packing_of(whole).choice == "packed"
    with torch.no_grad():
        found = engine(IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            wanted = whole(IDS).logits
    assert torch.equal(found, wanted), (found - wanted).abs().max()


def check_digest(config: RLConfig, path: Path) -> None:
    """It does not depend on how weights are cut."""
    assert config.deepspeed is not None
    whole = load_reference(str(path))
    with loading(config.deepspeed, "fp32"):
        model = load_reference(str(path))
    engine = cut_over_ranks(model, config.deepspeed, "fp32")
    assert weights_digest(engine) == weights_digest(whole)


def rescaled(reward: str) -> Any:
    """A critic that begins as a reward model whose rewards are normalised."""
    model = load_critic(reward, "reward_model")
    rescale_head(model, 0.7, 2.5)
    return model


def check_heads(config: RLConfig, path: Path, folder: Path) -> None:
    """Fresh ones are those of one process, drawn with its seed, whatever each rank would draw; also where the folder
    has a head of the same shape, which is not read then. Of `qwen2` one head that is fresh and one that is read."""
    reward = folder / f"reward {path.name}"
    if is_main_rank():
        trained = load_process_reward(str(path), 1)
        torch.nn.init.constant_(trained.score.weight, 5.0)
        torch.nn.init.constant_(trained.score.bias, 3.0)
        trained.save_pretrained(reward)
    barrier()
    loads = [lambda: load_critic(str(path), "policy"), lambda: rescaled(str(reward)),
             lambda: load_process_reward(str(path), 3), lambda: load_critic(str(reward), "reward_model"),
             lambda: load_critic(str(reward), "reward_model_body")]  # fmt: skip
    for load in loads[:2] if path.name == "qwen2" else loads:
        torch.manual_seed(7)
        whole = load()
        torch.manual_seed(7 + rank())
        with loading(config.deepspeed):
            model = load()
        engine = make_training_engine(config, model, config.optimizer, 1e-3, 1.0)
        assert_weights(engine.model.module, whole)


def main() -> None:
    """Check each folder."""
    torch.set_num_threads(1)
    set_up_logging()
    folder = Path(sys.argv[1])
    with process_group(timeout_seconds=300, is_needed_alone=True):
        for name in sys.argv[2:]:
            words = [f"output_dir={folder}", f"model.path={folder}/{name}", "precision=fp32", "deepspeed=zero3"]
            config = compose_config(RLConfig, "rl", words)
            if name.startswith("apart"):
                words = "ties model.embed_tokens.weight and lm_head.weight"
                with loading(config.deepspeed), pytest.raises(BadModel, match=words):
                    load_policy(str(folder / name))
                continue
            check_training(config, folder / name, folder)
            if name in ("llama", "qwen2"):
                check_reference(config, folder / name)
                check_heads(config, folder / name, folder)
            check_digest(config, folder / name)
            print(f"{name} on {world_size()} ranks: done", file=sys.stderr)


if __name__ == "__main__":
    main()
