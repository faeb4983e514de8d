"""Lose the machine in the middle of a run, disk and all, and go on as if nothing had been.

    python examples/resume/resume.py                               # minutes on two cores
    python examples/resume/resume.py --store s3://my-bucket/art    # with the steps in a bucket

An agent learns tic-tac-toe twice, from the same base model. One run is left alone. In the middle of
the other, the server is killed while it trains, and its disk is removed; another is started that
has nothing but the store. Every game is repeatable, so the two runs have to agree to the last bit:
the script fails if they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import art_cloud as art
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import home
from art_cloud.demo.game import REWARDS, Game
from art_cloud.demo.run import random_moves
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

TASKS = range(64)
"""Seeds of the opponent's moves."""
TRAIN = art.TrainConfig(learning_rate=7e-4)
TIMINGS = {"seconds", "tokens_per_second"}
ALONE = asyncio.Semaphore(1)
"""One request at a time: in a batch the last bits of a logprob depend on who else is in it."""


async def play(
    model: art.TrainableModel[Any], task: int, step: int, attempt: int
) -> art.Trajectory:
    """One game with the weights of `step`. Its seeds are its own, so it is always the same."""
    client, game = model.openai_client(), Game(task)
    moves: list[art.History] = []
    while game.outcome is None:
        board: Any = {"role": "user", "content": str(game)}
        async with ALONE:
            answer = await client.chat.completions.create(
                model=model.get_inference_name(step),
                messages=[board],
                max_tokens=4,
                seed=((step * 1000 + task) * 100 + attempt) * 10 + len(moves),
            )
        moves.append(art.History(messages_and_choices=[board, answer.choices[0]]))
        game.play(answer.choices[0].message.content or "")
    return art.Trajectory(
        messages_and_choices=moves[0].messages_and_choices,
        additional_histories=moves[1:],
        reward=REWARDS[game.outcome],
    )


async def learn(
    backend: art.Backend,
    model: art.TrainableModel[Any],
    options: argparse.Namespace,
    lose_at: int | None,
) -> None:
    """A warm-up, which is step 1, and then GRPO. The data cursor is a function of the step."""
    if await model.get_step() == 0:
        moves = [move for seed in range(options.warm_up) for move in random_moves(-seed - 1)]
        await backend.train_sft(model, moves, learning_rate=3e-3, batch_size=64)
    first = await model.get_step() - 1
    epochs = -(-options.steps * options.groups // len(TASKS))
    for batch in art.iterate_dataset(TASKS, options.groups, epochs, initial_step=first):
        if batch.step == options.steps:
            break
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(
                play(model, task, batch.step + 1, attempt) for attempt in range(options.group_size)
            )
            for task in batch.items
        )
        training = asyncio.create_task(backend.train(model, groups, TRAIN))
        if batch.step == lose_at:
            await asyncio.sleep(0.2)  # into the step
            await lose_the_machine()
        result = await training
        print(f"{result.policy}: reward {result.metrics['reward']:.3f}", flush=True)


async def lose_the_machine() -> None:
    """Kill all that runs on the cluster's machine, and remove its disk."""
    [instance] = await get_provider("local").list()
    os.killpg(int(instance.detail.removeprefix("pid ")), signal.SIGKILL)
    while await get_provider("local").list():
        await asyncio.sleep(0.02)
    shutil.rmtree(home() / "clusters" / instance.name)
    print("The machine is lost, and its disk with it.", flush=True)


async def run(options: argparse.Namespace, folder: Path) -> dict[str, list[Manifest]]:
    """The histories of the two runs; the machine of the second one is lost."""
    store = options.store or (folder / "store").as_uri()
    histories = {}
    for name, lose_at in (("alone", None), ("lost", options.steps // 2)):
        model: art.TrainableModel[Any] = art.TrainableModel(
            name=f"{name}-{folder.name}", project="resume", base_model=str(folder / "model")
        )
        async with art.up("local", name="resume", store=store, durability="async") as backend:
            await model.register(backend)
            await learn(backend, model, options, lose_at)
        histories[name] = Checkpoints(open_store(store), model.full_name).manifests()
    return histories


def check_same(alone: Sequence[Manifest], lost: Sequence[Manifest]) -> None:
    """Weights, moments and metrics, by step. Raises `SystemExit` at the first difference."""
    assert [manifest.step for manifest in lost] == list(range(len(alone))), "a step is missing"
    for one, other in zip(alone, lost, strict=True):
        files = one.files == other.files
        metrics = {key: one.metrics[key] for key in one.metrics if key not in TIMINGS} == {
            key: other.metrics[key] for key in other.metrics if key not in TIMINGS
        }
        if not (files and metrics):
            raise SystemExit(f"Step {one.step} differs: {one.policy} and {other.policy}.")
    print(f"{len(lost)} steps, each there once; both runs are equal to the bit.")


def plot(alone: Sequence[Manifest], lost: Sequence[Manifest], lost_at: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for label, history, style in (
        ("left alone", alone, {"color": "#8a8f98", "linewidth": 6, "alpha": 0.4}),
        ("machine lost, gone on from the store", lost, {"color": "#1a7f5a", "linewidth": 1.5}),
    ):
        trained = [manifest for manifest in history if manifest.kind == "train"]
        steps = [manifest.step - 1 for manifest in trained]
        axes.plot(steps, [m.metrics["reward"] for m in trained], label=label, **style)
    axes.axvline(lost_at + 0.5, color="#c0392b", linestyle="--", linewidth=1)
    axes.annotate(
        " machine killed,\n disk removed",
        (lost_at + 0.5, 0.98),
        xycoords=("data", "axes fraction"),
        verticalalignment="top",
        color="#c0392b",
    )
    axes.set(title="Tic-tac-toe against a random opponent", xlabel="GRPO step", ylabel="reward")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="URL of the store; without it, a folder that is removed")
    parser.add_argument("--steps", type=int, default=24, help="of GRPO")
    parser.add_argument("--plot", type=Path, default=Path("resume.png"), help="where the PNG goes")
    parser.add_argument("--smoke", action="store_true", help="only see that it runs")
    options = parser.parse_args()
    options.groups, options.group_size, options.warm_up = 6, 8, 1000
    if options.smoke:
        options.steps, options.groups, options.group_size, options.warm_up = 4, 2, 2, 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        os.environ["ART_CLOUD_HOME"] = str(folder / "home")
        command = [sys.executable, "-m", "art_server.tiny_model", str(folder / "model")]
        subprocess.run(command, check=True, capture_output=True)
        histories = asyncio.run(run(options, folder))
    check_same(histories["alone"], histories["lost"])
    plot(histories["alone"], histories["lost"], options.steps // 2, options.plot)


if __name__ == "__main__":
    main()
