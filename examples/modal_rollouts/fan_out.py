"""The rollouts of train.py as a Modal function: one call for each group, many at once.

A function gets the server's address and token, and Modal's proxy token, as arguments: Modal carries
them encrypted, and they stand in no log.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import modal
from train import group

import art_cloud as art
from art_cloud.clusters.install import source

app = modal.App("art-rollouts")


def installed() -> modal.Image:
    """With the art-cloud that runs here: a wheel of the checkout, or the release."""
    base, this = modal.Image.debian_slim(python_version="3.12"), source()
    if this.wheel is not None:
        there = f"/wheels/{this.wheel.name}"
        base = base.add_local_file(this.wheel, there, copy=True)
        base = base.uv_pip_install(f"art-cloud @ file://{there}")
    else:
        base = base.uv_pip_install(f"art-cloud=={art.__version__}")
    return base.add_local_python_source("train")


image = installed() if modal.is_local() else None


@dataclass(frozen=True)
class Job:
    """One group of rollouts, and the server that it asks."""

    url: str
    inference_url: str
    token: str
    headers: dict[str, str]
    model: dict[str, Any]
    country: str
    attempts: int


@app.function(image=image, timeout=1800)
async def roll_out(job: dict[str, Any]) -> str:
    """The group as JSON: ids and logprobs of what was sampled come along."""
    asked = Job(**job)
    model = art.TrainableModel.model_validate(asked.model)
    async with art.connect(
        asked.url,
        asked.token,
        headers=asked.headers,
        sleeps=True,
        inference_url=asked.inference_url,
    ) as backend:
        await model.register(backend)
        return (await group(model, asked.country, asked.attempts)).model_dump_json()


class OnModal:
    """Rolls out in Modal functions."""

    async def groups(
        self, model: art.TrainableModel[Any], countries: list[str], attempts: int
    ) -> list[art.TrajectoryGroup]:
        jobs = [asdict(job_of(model, country, attempts)) for country in countries]
        return [
            art.TrajectoryGroup.model_validate_json(text) async for text in roll_out.map.aio(jobs)
        ]


def job_of(model: art.TrainableModel[Any], country: str, attempts: int) -> Job:
    backend = model.backend()
    assert model.inference_api_key is not None
    headers = {"Modal-Key": "MODAL_PROXY_TOKEN_ID", "Modal-Secret": "MODAL_PROXY_TOKEN_SECRET"}
    return Job(
        url=backend.url,
        inference_url=backend.inference_url,
        token=model.inference_api_key,
        headers={name: os.environ[variable] for name, variable in headers.items()},
        model=model.model_dump(include={"name", "project", "base_model", "lora"}),
        country=country,
        attempts=attempts,
    )
