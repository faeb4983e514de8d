"""A trained adapter where others serve it: a repository of the Hugging Face hub, Together AI."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from ..shared.errors import AuthError, ConfigError, InvalidRequestError, ServerUnavailableError
from ..shared.protocol import Metrics
from .adapters import CONFIG, pull
from .checkpoints import Checkpoints, Manifest
from .transfer import Watch

CARD = "README.md"
TOGETHER = "https://api.together.ai/v1"
URL_SECONDS = 3 * 3600
"""Together wants the URL of an archive to hold for 100 minutes at least."""
TIMEOUT_SECONDS = 60.0


def hub_folder(
    steps: Checkpoints,
    manifest: Manifest,
    folder: Path,
    *,
    base_model: str | None = None,
    watch: Watch | None = None,
) -> None:
    """Write a step's adapter to `folder` as the hub has adapters: a PEFT folder with a model card.

    Args:
        base_model: its name on the hub, if the model was registered with a folder.

    Raises:
        ConfigError: the base model is a folder, and its name on the hub is not given.
        ConflictError: `folder` exists.
    """
    base_model = base_model or manifest.base_model
    if Path(base_model).is_absolute():
        raise ConfigError(
            f"{manifest.policy} was trained on {base_model}, a folder that nobody else has. Say "
            "which model of the hub it is: --base-model OWNER/NAME"
        )
    pull(steps, manifest, folder, watch=watch)
    config = json.loads((folder / CONFIG).read_text())
    if config["base_model_name_or_path"] != base_model:
        text = json.dumps(config | {"base_model_name_or_path": base_model}, indent=2)
        (folder / CONFIG).write_text(text)
    [metrics] = [info.metrics for info in steps.infos() if info.step == manifest.step]
    (folder / CARD).write_text(card(manifest, base_model, metrics))


def card(manifest: Manifest, base_model: str, metrics: Metrics) -> str:
    """The model card: metadata as the hub reads it, what it was trained to, how to use it."""
    rows = [f"| `{name}` | {value:.4g} |" for name, value in sorted(metrics.items())]
    return f"""---
base_model: {base_model}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
- reinforcement-learning
- art-cloud
---

# {manifest.model}

Step {manifest.step} of `{manifest.name}`: a LoRA (rank {manifest.lora.rank}, alpha \
{manifest.lora.alpha}) on [{base_model}](https://huggingface.co/{base_model}), trained with \
art-cloud {manifest.versions.get("art-cloud", "")}.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base_model}")
model = AutoModelForCausalLM.from_pretrained("{base_model}")
model = PeftModel.from_pretrained(model, "THIS_REPOSITORY")
```

| metric | value |
|---|---|
{chr(10).join(rows)}
"""


class TogetherJob(BaseModel):
    job_id: str
    model_name: str


class _TogetherReply(BaseModel):
    data: TogetherJob


def together(
    steps: Checkpoints,
    manifest: Manifest,
    *,
    base_model: str | None = None,
    source: str | None = None,
) -> TogetherJob:
    """Have Together AI fetch the adapter of a step. Needs TOGETHER_API_KEY.

    `POST /models` of its API (https://docs.together.ai/reference/upload-model), with `model_type`
    "adapter". It is never sent twice: each call makes a job.

    Args:
        base_model: its name at Together, if it has another one there.
        source: a repository on the Hugging Face hub, which HF_TOKEN opens if it is private. None:
            an archive in the store, which has to be in S3, at a URL that holds for three hours.

    Raises:
        ConfigError: no key; or no source, and the store is a folder.
        AuthError, InvalidRequestError: what Together answers, in its words.
        ServerUnavailableError: it gave no answer, or one that can't be read: a job may exist.
    """
    key = os.environ.get("TOGETHER_API_KEY")
    if not key:
        raise ConfigError(
            "TOGETHER_API_KEY is not set. https://api.together.ai/settings/api-keys has yours."
        )
    token = os.environ.get("HF_TOKEN")
    request = {
        "model_name": f"{manifest.project}-{manifest.model}-step-{manifest.step}",
        "model_source": source or _archive_url(steps, manifest),
        "model_type": "adapter",
        "base_model": base_model or manifest.base_model,
        "description": f"{manifest.policy}, trained with art-cloud",
        **({"hf_token": token} if source and token else {}),
    }
    url = f"{os.environ.get('TOGETHER_BASE_URL', TOGETHER).rstrip('/')}/models"
    try:
        answer = httpx.post(
            url,
            json=request,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT_SECONDS,
        )
    except httpx.TransportError as error:
        raise ServerUnavailableError(f"{url} did not answer: {error}. Try again.") from error
    if answer.status_code in (401, 403):
        raise AuthError(f"Together refused the key: {_reason(answer)}. See TOGETHER_API_KEY.")
    if answer.is_client_error:
        raise InvalidRequestError(f"Together refused the adapter: {_reason(answer)}")
    try:
        return _TogetherReply.model_validate_json(answer.raise_for_status().content).data
    except (httpx.HTTPStatusError, ValidationError) as error:
        raise ServerUnavailableError(
            f"{url} gave no answer that says what came of it (status {answer.status_code}). Look "
            "at your models there before you try again."
        ) from error


def _archive_url(steps: Checkpoints, manifest: Manifest) -> str:
    """A URL of the adapter as one archive, its files at the root, as Together takes it."""
    if steps.store.url.startswith("file:"):
        raise ConfigError(
            f"{steps.store.url} is a folder, where Together can't fetch. Upload the adapter to the "
            "hub (art-cloud deploy hub) and name it by --source, or keep the steps in an S3 store."
        )
    archive = io.BytesIO()
    with tempfile.TemporaryDirectory() as there, tarfile.open(fileobj=archive, mode="w:gz") as tar:
        folder = Path(there) / "adapter"
        pull(steps, manifest, folder)
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name)
    key = f"{manifest.name}/deploy/{manifest.step:06d}.tar.gz"
    steps.store.create(key, archive.getvalue())  # it is there already, if this step was sent before
    return steps.store.presign(key, URL_SECONDS)


def _reason(answer: httpx.Response) -> Any:
    """`error.message`, as OpenAI's and Together's errors have it; else the text itself."""
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.text.split())[:300] or answer.reason_phrase
