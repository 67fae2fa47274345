"""This project's side: `main.py` itself, one iteration whenever it is asked.

    python -m benchmarks.rl.product [--restarts] [--drawn-rewards] -cn exp/ppo/grpo_word_arithmetic key=value ...

The program is run whole; only `Trainer.iterate` waits for its turn. With `--restarts` the engine gets new weights as
published systems give them: the policy is saved, the server stopped, and another one started on it. With
`--drawn-rewards` the outcome is `drawn_reward`'s.
"""

import asyncio
import json
import logging
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.rl.drawn_rewards import drawn_reward
from espalier.data.records import Trajectory
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.delivery.weight_update_engine import VLLMEngine
from espalier.rl.trainer import Trainer
from espalier.sampling.server import VLLMServer


def wait_for_turn() -> None:
    """Until a line comes; the end of the questions ends the program."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def iterate_when_asked() -> None:
    """Every iteration of the program answers one question with its seconds and metrics."""
    iterate = Trainer.iterate

    def asked(trainer: Trainer, iteration: int) -> dict[str, float]:
        wait_for_turn()
        started = time.perf_counter()
        values = iterate(trainer, iteration)
        answer = {"seconds": time.perf_counter() - started, "metrics": values}
        print("result " + json.dumps(answer), flush=True)
        return values

    setattr(Trainer, "iterate", asked)  # noqa: B010


def restart_instead_of_reloading() -> None:
    """New weights are served by a new server; the address stays, so that the client does too."""
    servers: list[VLLMServer] = []
    start = VLLMServer.start

    def noted(server: VLLMServer) -> VLLMServer:
        servers.append(server)
        return start(server)

    async def restart(engine: VLLMEngine, folder: Path) -> None:
        (server,) = set(servers)
        original = Path(getattr(server, "first_model", server.model))
        setattr(server, "first_model", str(original))  # noqa: B010
        kept = Path(tempfile.mkdtemp(prefix="restart-"))
        for path in original.glob("*.json"):
            shutil.copy(path, kept)
        shutil.copy(folder / "model.safetensors", kept)
        await asyncio.to_thread(server.stop)
        old, server.model = server.model, str(kept)
        await asyncio.to_thread(start, server)
        if old != str(original):
            shutil.rmtree(old, ignore_errors=True)

    setattr(VLLMServer, "start", noted)  # noqa: B010
    setattr(VLLMEngine, "load", restart)  # noqa: B010


def draw_rewards() -> None:
    """Outcomes are drawn by tokens."""

    def drawn(reward: OutcomeReward, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(drawn_reward(row.response_ids)) for row in trajectories]

    setattr(OutcomeReward, "__call__", drawn)  # noqa: B010


def main() -> None:
    """Run the program."""
    logging.disable(logging.INFO)
    settings: list[Any] = sys.argv[1:]
    if "--restarts" in settings:
        settings.remove("--restarts")
        restart_instead_of_reloading()
    if "--drawn-rewards" in settings:
        settings.remove("--drawn-rewards")
        draw_rewards()
    iterate_when_asked()
    sys.argv = [str(ROOT / "main.py"), *settings]
    sys.orig_argv = [sys.executable, *sys.argv]
    runpy.run_path(str(ROOT / "main.py"), run_name="__main__")


if __name__ == "__main__":
    main()
