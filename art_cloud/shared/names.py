"""Names of projects, models and policies.

A *policy* is one immutable set of weights: `project/model@17` is step 17 of that model, and it is
the only kind of name that an engine knows. `project/model` means the newest step of it at the time
of a request. A name without a slash-and-step that the server was started with is the base model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STEP = re.compile(r"[0-9]{1,9}")


def check_name(value: str, what: str) -> str:
    """Return `value`, or raise `ConfigError` if it can't be part of a path, a URL and a key."""
    if not NAME.fullmatch(value) or ".." in value:
        raise ConfigError(
            f"{what} {value!r} is not a valid name. Use 1 to 64 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit."
        )
    return value


def whole_path(base_model: str) -> str:
    """The base model's name; where it is a folder of this machine, its whole path.

    Processes that work in different folders then mean the same one.
    """
    folder = Path(base_model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else base_model


@dataclass(frozen=True, order=True)
class ModelName:
    """`project/model`: one trainable adapter and its history of steps."""

    project: str
    model: str

    def __post_init__(self) -> None:
        check_name(self.project, "project")
        check_name(self.model, "model")

    def __str__(self) -> str:
        return f"{self.project}/{self.model}"

    def at(self, step: int) -> PolicyName:
        return PolicyName(self, step)

    @classmethod
    def parse(cls, text: str) -> ModelName:
        project, slash, model = text.partition("/")
        if not slash:
            raise ConfigError(f"{text!r} does not name a model. Write it as project/model.")
        return cls(project, model)


@dataclass(frozen=True, order=True)
class PolicyName:
    """`project/model@step`: one set of weights, for ever."""

    model: ModelName
    step: int

    def __str__(self) -> str:
        return f"{self.model}@{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyName:
        name, at, step = text.rpartition("@")
        if not at or not STEP.fullmatch(step):
            raise ConfigError(f"{text!r} does not name a policy. Write it as project/model@step.")
        return cls(ModelName.parse(name), int(step))
