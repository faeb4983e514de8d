"""A script in the form of OpenPipe ART's examples runs as it is, but for its backend line."""

from __future__ import annotations

import random

from pydantic import BaseModel

import art_cloud as art

from .stand_in import TOKEN, StandIn, checkpoint, serve


class Scenario(BaseModel):
    seed: int


async def rollout(model: art.Model, scenario: Scenario) -> art.Trajectory:  # type: ignore[type-arg]
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "You pick numbers."}],
        metadata={"seed": scenario.seed},
        reward=0,
    )
    client = model.openai_client()
    for turn in range(2):
        trajectory.messages_and_choices.append({"role": "user", "content": f"turn {turn}"})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_completion_tokens=16,
        )
        trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.reward = random.Random(scenario.seed).random()
    trajectory.metrics["turns"] = 2
    return trajectory.finish()


async def script(url: str) -> art.TrainableModel:  # type: ignore[type-arg]
    model = art.TrainableModel(name="agent-001", project="numbers", base_model="tiny")
    backend = art.Backend(url, TOKEN)  # the backend line
    await model.register(backend)

    for i in range(await model.get_step(), 3):
        train_groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(model, Scenario(seed=8 * i + s)) for s in range(4))
                for _ in range(2)
            ),
            pbar_desc="gather",
            max_exceptions=10,
        )
        validation = await art.gather_trajectories(
            (rollout(model, Scenario(seed=s)) for s in range(2)), pbar_desc="val"
        )
        await model.log(validation, split="val")
        await model.delete_checkpoints()
        result = await backend.train(model, train_groups, learning_rate=1e-5)
        await model.log(train_groups, metrics=result.metrics, step=result.step, split="train")
    await backend.close()
    return model


async def test_the_script_trains() -> None:
    server = StandIn()
    server.checkpoints = [checkpoint(0, "numbers", "agent-001", **{"val/reward": 0.5})]
    with serve(server.app()) as url:
        await script(url)
    assert server.step == 3
    assert [len(batch.samples) for batch in server.batches] == [16, 16, 16]
    assert [entry["split"] for entry in server.logged] == ["val", "train"] * 3
    assert server.batches[0].metrics["trajectory/turns"] == 2
