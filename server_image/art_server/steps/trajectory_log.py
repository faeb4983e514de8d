"""Trajectories kept as Parquet, one row each: what was trained on, and what was logged.

    {project}/{model}/trajectories/{split}/{step:06d}-{id}.parquet

All files have one schema, whatever their split, so that DuckDB and pandas read them together. `id`
is that of the train call, or a hash of what was logged: a call that is made twice writes one file.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from art_cloud.shared.errors import InvalidRequestError, StoreError
from art_cloud.shared.names import check_name
from art_cloud.shared.protocol import LogRequest
from art_cloud.shared.wire import PackedBatch, PackedSample, decode_batch
from art_cloud.store.checkpoints import Checkpoints

from ..training import BaseModel
from .jobs import Report

log = logging.getLogger(__name__)

TRAIN = "train"
"""The split of what was trained on."""
MOST_BYTES = 1 << 30
"""Of the samples of one logged call, once they are written out."""

SAMPLE = pa.struct(
    [
        ("policy", pa.string()),
        ("prompt_ids", pa.list_(pa.uint32())),
        ("completion_ids", pa.list_(pa.uint32())),
        ("logprobs", pa.list_(pa.float32())),
        ("temperature", pa.float64()),
        ("masked", pa.bool_()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),
        ("call_id", pa.string()),
        ("group", pa.int64()),
        ("trajectory", pa.int64()),
        ("reward", pa.float64()),
        ("metrics", pa.string()),
        ("metadata", pa.string()),
        ("messages", pa.string()),
        ("logs", pa.list_(pa.string())),
        ("samples", pa.list_(SAMPLE)),
    ]
)


def write_logged(checkpoints: Checkpoints, entry: LogRequest, base: BaseModel | None) -> None:
    """Keep the trajectories that were logged for a step.

    Raises `InvalidRequestError` if their samples are not what a client sends.
    """
    if not entry.trajectories:
        return
    split = check_name(entry.split, "split")
    sent = decode_batch(entry.samples, MOST_BYTES).samples if entry.samples else []
    samples = _samples(sent, base)
    if any(place >= len(samples) for row in entry.trajectories for place in row.samples):
        raise InvalidRequestError(
            f"A trajectory names a sample that is not among the {len(samples)} sent."
        )
    rows = [
        {
            "step": entry.step,
            "split": split,
            "group": row.group,
            "trajectory": row.trajectory,
            "reward": row.reward,
            "metrics": _json(row.metrics),
            "metadata": _json(row.metadata),
            "messages": _json(row.messages),
            "logs": row.logs,
            "samples": [samples[index] for index in row.samples],
        }
        for row in entry.trajectories
    ]
    content = _parquet(rows)
    _put(checkpoints, split, entry.step, hashlib.sha256(content).hexdigest()[:32], content)


def keeper(
    checkpoints: Checkpoints,
    batch: PackedBatch,
    step: int,
    call_id: str,
    base: BaseModel | None,
    report: Report,
) -> Callable[[], Awaitable[None]]:
    """What keeps the batch that a step is trained on, to be called once the step is stored.

    The file is made from now on and written then: there is none of a step that was not counted. If
    only the writing fails, the step stands, and a warning says so.
    """
    work = asyncio.to_thread(_of_batch, batch, step, call_id, base)
    making = asyncio.gather(work, return_exceptions=True)  # nobody asks, if there is no step

    async def keep() -> None:
        try:
            [made] = await making
            if isinstance(made, BaseException):
                raise made
            await asyncio.to_thread(_put, checkpoints, TRAIN, step, call_id, made)
        except Exception as error:  # whatever it is, the step is stored already
            text = f"The trajectories of step {step} were not kept; the step itself is. {error}"
            log.warning(
                "%s: %s", checkpoints.name, text, exc_info=not isinstance(error, StoreError)
            )
            with suppress(Exception):  # the server is about to end
                report({"phase": "done", "warning": text})

    return keep


def _of_batch(batch: PackedBatch, step: int, call_id: str, base: BaseModel | None) -> bytes:
    samples = _samples(batch.samples, base)
    return _parquet(
        {
            "step": step,
            "split": TRAIN,
            "call_id": call_id,
            "group": number,
            "trajectory": place,
            "reward": reward,
            "metrics": _json(group.metrics[place] if group.metrics else {}),
            "metadata": _json(group.metadata[place] if group.metadata else {}),
            "logs": [],
            "samples": [samples[index] for index in group.samples[place]],
        }
        for number, group in enumerate(batch.groups)
        for place, reward in enumerate(group.rewards)
    )


def _json(content: object) -> str:
    """As JSON has it: what is no finite number becomes null."""
    return to_json(content, inf_nan_mode="null").decode()


def _samples(samples: Sequence[PackedSample], base: BaseModel | None) -> list[dict[str, Any]]:
    """Rows of `SAMPLE`; without a base model, without texts."""
    texts: dict[bytes, str] = {}

    def text(ids: array[int]) -> str | None:
        if base is None:
            return None
        key = ids.tobytes()  # a group's samples share their prompt
        if key not in texts:
            texts[key] = str(base.tokenizer.decode(ids.tolist()))
        return texts[key]

    return [
        {field: getattr(sample, field) for field in PackedSample.__dataclass_fields__}
        | {"prompt": text(sample.prompt_ids), "completion": text(sample.completion_ids)}
        for sample in samples
    ]


def _parquet(rows: Iterable[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), file, compression="zstd")
    return file.getvalue()


def _put(checkpoints: Checkpoints, split: str, step: int, name: str, content: bytes) -> None:
    key = f"{checkpoints.name}/trajectories/{split}/{step:06d}-{name}.parquet"
    checkpoints.store.create(key, content)
