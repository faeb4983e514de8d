"""The parts of a server that serve and make steps: made here, and handed to each other once."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from art_cloud.shared.protocol import Durability, EngineName
from art_cloud.store.checkpoints import Writer
from art_cloud.store.opening import open_store

from ..inference.placement import Mode
from .compute import Compute
from .models import Models, ReadOnlyModels
from .policies import Policies
from .programs import Programs
from .publishing import NoteStored, Publisher, nobody


@dataclass(frozen=True)
class Settings:
    state: Path
    store: str
    engine: EngineName = "transformers"
    vllm_python: str | None = None
    placement: Mode | None = None
    name: str = "server"
    """Of the cluster."""
    durability: Durability = "sync"
    read_only: bool = False
    """Serve what the store has; make nothing."""
    max_bytes: int = 512 << 20
    """Of a request's body, and of what it holds."""


class Runtime:
    """What the server computes with (`compute`), what it knows of its models (`models`), what the
    engine serves of them (`policies`), and what jobs do (`programs`)."""

    def __init__(self, settings: Settings, note_stored: NoteStored = nobody) -> None:
        self.settings = settings
        self.store = open_store(settings.store, create=not settings.read_only)
        self.compute = Compute(settings.engine, settings.vllm_python, settings.placement)
        self.models = (
            ReadOnlyModels(self.store, self.compute.open)
            if settings.read_only
            else Models(self.store)
        )
        self.policies = Policies(
            self.compute,
            self.models,
            settings.state / "cache",
            only="adapter/" if settings.read_only else "",
        )
        writer = Writer(
            cluster=settings.name, host=socket.gethostname(), started_at=datetime.now(UTC)
        )
        self.programs = Programs(
            self.compute,
            self.models,
            self.policies,
            Publisher(self.compute, self.policies, settings.durability, writer, note_stored),
            settings.max_bytes,
        )

    async def close(self) -> None:
        await self.compute.close()
