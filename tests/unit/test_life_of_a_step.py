"""What docs/develop/life-of-a-step.md says is so: the way of a call, and the arrows of a model."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from unittest.mock import MagicMock
from uuid import uuid4

import httpx
from art_server.api.app import Routes, make_app
from art_server.steps.jobs import Jobs
from art_server.steps.journal import Journal
from art_server.steps.models import ModelState
from art_server.steps.runtime import Runtime, Settings

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import CALL_ID, JobInfo, RegisterRequest
from art_cloud.shared.wire import encode_batch

from ..rigs.synthetic import batch
from .test_docs import FENCE, listed, section

PAGE = "docs/develop/life-of-a-step.md"
NAME = ModelName("way", "agent")
ROOMS = ("inference", "training")
"""Rooms behind one door each."""


@contextmanager
def modules_entered(route: object) -> Iterator[set[str]]:
    """The modules of the server whose functions are called, in any thread, once `route` is."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (found or frame.f_code is getattr(route, "__code__", None)):
            name = frame.f_globals.get("__name__", "")
            if name.startswith("art_server."):
                found.add(name.removeprefix("art_server."))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def test_a_train_call_goes_the_way_that_the_page_draws(
    tmp_path: Path, tiny_model: Path
) -> None:
    with modules_entered(Routes.train) as entered:
        state = tmp_path / "state"
        state.mkdir()
        journal = Journal(state / "journal.sqlite")
        jobs = Jobs(journal)
        runtime = Runtime(Settings(state, str(tmp_path / "store")), jobs.note_stored)
        app = make_app(runtime, jobs, MagicMock(), token="token")
        jobs.start(runtime.programs.run)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://server/art/v1",
            headers={"Authorization": "Bearer token"},
        ) as http:

            async def make(method: str, path: str, body: bytes) -> JobInfo:
                headers = {CALL_ID: uuid4().hex}
                sent = await http.request(method, path, content=body, headers=headers)
                assert sent.status_code == httpx.codes.ACCEPTED, sent.text
                job = JobInfo.model_validate_json(sent.content).id
                events = (await http.get(f"/jobs/{job}/events")).text
                assert "event: done" in events, events
                return JobInfo.model_validate_json((await http.get(f"/jobs/{job}")).content)

            request = RegisterRequest(base_model=str(tiny_model), lora=LoRAConfig(rank=2))
            await make("PUT", f"/models/{NAME}", request.model_dump_json().encode())
            assert entered == set()
            made = await make("POST", f"/models/{NAME}/train", encode_batch(batch(NAME, 1)))
            assert made.result
            assert made.result.step == 1
    await jobs.stop(10)
    await runtime.close()
    journal.close()
    way = {name.replace(".", "/") for name in entered if not name.startswith(ROOMS)}
    table = section(PAGE, "## The way of a train call")
    assert way == set(re.findall(r"^\| `(.+)\.py` \|", table, re.MULTILINE))
    assert len(way) + len(ROOMS) + len(["the store"]) <= 15


def test_every_arrow_of_a_model_is_drawn() -> None:
    """Whatever changes a `ModelState` is on the page, under the name of its method."""
    text = section(PAGE, "## A model on a server")
    drawn = set(listed(text)) | set(" ".join(FENCE.findall(text)).replace(":", " ").split())
    changes = {
        name
        for name, member in vars(ModelState).items()
        if not name.startswith(("_", "is_", "until_", "check_", "step_of"))
        and not isinstance(member, property)
    }
    assert len(changes) > 10
    assert changes <= drawn
