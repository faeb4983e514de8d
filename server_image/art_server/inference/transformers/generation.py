"""What is generated, and the news of it: between the asyncio side and the scheduler's thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from art_cloud.shared.errors import ArtCloudError

from .detokenize import TextStream
from .sampling import SamplingParams

FinishReason = Literal["stop", "length"]


class Token(NamedTuple):
    id: int
    logprob: float
    """The logprob at the sampling temperature, as in a sample."""
    top: list[tuple[int, float]]


class Piece(NamedTuple):
    """News of one choice: text that can be shown, and the tokens since the piece before it."""

    row: Row
    text: str
    tokens: list[Token]
    finish_reason: FinishReason | None


Event = Piece | ArtCloudError


@dataclass(eq=False, slots=True)
class Generation:
    """`choices` continuations of one prompt, told to `events` on the loop that asked for them."""

    prompt_ids: list[int]
    policy: str | None
    params: SamplingParams
    choices: int
    streamed: bool
    events: asyncio.Queue[Event]
    first_index: int = 0
    cancelled: bool = False

    @property
    def final_length(self) -> int:
        return len(self.prompt_ids) + self.params.max_tokens


@dataclass(eq=False, slots=True)
class Row:
    """One choice. The scheduler's thread changes it until its last piece is out."""

    generation: Generation
    choice: int
    text: TextStream
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.generation.first_index + self.choice
