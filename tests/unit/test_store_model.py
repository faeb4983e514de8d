"""What the README promises of the store, in every order in which servers, `rm`, `prune`, `gc`,
`fork` and `push` can come to it, each of them stopped for any time, or for ever, before any call.

The code is the real one of checkpoints.py, retention.py and upkeep.py. The store is in memory, so
that some hundred thousand runs take minutes, and promises what `Store` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache, partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from art_cloud.shared.config import LoRAConfig, Retention
from art_cloud.shared.errors import ConflictError, NotFoundError, RivalError
from art_cloud.shared.names import ModelName
from art_cloud.store import checkpoints as checkpoints_module
from art_cloud.store import garbage as upkeep_module
from art_cloud.store.base import Blob, Moved, missing_blob, sha256_of, unwatched
from art_cloud.store.checkpoints import Checkpoints, Kind, Manifest, superseded
from art_cloud.store.garbage import GRACE, Garbage, collect_garbage, find_garbage
from art_cloud.store.retention import prune

from ..rigs.schedules import Actor, Explored, Run, Violation, explore

NAME, COPY = ModelName("games", "agent"), ModelName("games", "copy")
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
KEY = re.compile(r"([^/]+/[^/]+)/(steps|removed)/(\d+)\.json")
ONE = Retention(keep_last=1)


class MemoryStore:
    """As `Store` promises. Each call is one moment, but for the two of `put_blob`."""

    url = "memory:"
    single_writer = False
    credentials_until: datetime | None = None

    def __init__(self, run: Run) -> None:
        self.run = run
        self.now = FIRST
        self.keys: dict[str, bytes] = {}
        self.content: dict[Blob, datetime] = {}

    def read(self, key: str) -> bytes:
        def work() -> bytes:
            if key not in self.keys:
                raise NotFoundError(key)
            return self.keys[key]

        return self.run.call(f"read {key}", work, looks=True)

    def create(self, key: str, data: bytes) -> bool:
        return self.run.call(f"create {key}", lambda: self.keys.setdefault(key, data) is data)

    def list(self, prefix: str) -> list[str]:
        def work() -> list[str]:
            return sorted(key for key in self.keys if key.startswith(prefix))

        return self.run.call(f"list {prefix}", work, looks=True)

    def delete(self, key: str) -> None:
        def work() -> None:
            if self.keys.pop(key, None) is None:
                raise NotFoundError(key)

        self.run.call(f"delete {key}", work)

    def put_blob(self, source: Path, moved: Moved = unwatched) -> Blob:
        blob = sha256_of(source)
        if not self.touch_blob(blob):
            self.run.call(f"send {source.name}", lambda: self._touch(blob))
        return blob

    def touch_blob(self, blob: Blob) -> bool:
        def work() -> bool:
            if there := blob in self.content:
                self._touch(blob)
            return there

        return self.run.call(f"touch {blob.sha256[:6]}", work)

    def _touch(self, blob: Blob) -> None:
        self.content[blob] = self.now

    def get_blob(self, blob: Blob, target: Path, moved: Moved = unwatched) -> None:
        if not self.run.call(f"get {blob.sha256[:6]}", lambda: blob in self.content):
            raise missing_blob(self.url, blob.sha256)

    def blobs(self) -> Iterator[tuple[Blob, datetime]]:
        def work() -> list[tuple[Blob, datetime]]:
            return sorted(self.content.items(), key=lambda one: one[0].sha256)

        return iter(self.run.call("list blobs", work, looks=True))

    def delete_blob(self, sha256: str, before: datetime) -> bool:
        def work() -> bool:
            for blob, stored_at in self.content.items():
                if blob.sha256 == sha256:
                    if stored_at < before:
                        del self.content[blob]
                    return stored_at < before
            raise NotFoundError(sha256)

        return self.run.call(f"delete {sha256[:6]}", work)

    def presign(self, what: str | Blob, seconds: int) -> str:
        raise AssertionError("no scene asks for this")

    def renew(self, credentials: Mapping[str, SecretStr]) -> None:
        raise AssertionError("no scene asks for this")


@lru_cache(100_000)
def parsed(data: bytes) -> Manifest:
    return Manifest.model_validate_json(data)


class Games:
    """A store with two models, who works on them, and what was said to them."""

    folders: Path
    now: Games
    """The one that runs."""

    def __init__(self, run: Run, cast: Callable[[Games], Sequence[Actor]]) -> None:
        Games.now = self
        self.run = run
        self.store = MemoryStore(run)
        self.acknowledged: dict[tuple[str, str], int] = {}
        """By model and call."""
        self.refused: set[tuple[str, str]] = set()
        """Calls that were told that they do not count."""
        self.given: dict[tuple[str, int], str] = {}
        """To which call the number of a step was given."""
        self.highest: dict[str, int] = {}
        self.named = 0
        self.cast = cast(self)

    def actors(self) -> Sequence[Actor]:
        return self.cast

    def state(self) -> Hashable:
        return (
            *(frozenset(self.store.keys.items()), frozenset(self.store.content.items())),
            *(self.store.now, frozenset(self.acknowledged.items()), frozenset(self.refused)),
            *(frozenset(self.given.items()), frozenset(self.highest.items())),
        )

    def of(self, name: ModelName = NAME) -> Checkpoints:
        return Checkpoints(self.store, name)

    def folder(self, content: str) -> Path:
        """A checkpoint of one file."""
        folder = self.folders / content
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / f"{content}.safetensors").write_text(content)
        return folder

    def draft(self, step: int, call: str, kind: Kind = "train", name: ModelName = NAME) -> Manifest:
        return Manifest(
            project=name.project,
            model=name.model,
            step=step,
            kind=kind,
            call_id=call,
            parent=None,
            base_model="tiny",
            lora=LoRAConfig(),
            versions={},
        )

    def have(self, *calls: str, name: ModelName = NAME) -> None:
        """The model was registered, and these calls made a step each."""
        Server(self, "before", calls, name=name).run()

    def later(self, hours: float = 25) -> None:
        self.run.call(f"{hours} hours pass", self._later)

    def _later(self) -> None:
        self.store.now += timedelta(hours=25)

    def acknowledge(self, call: str, step: int, name: ModelName) -> None:
        assert self.acknowledged.setdefault((str(name), call), step) == step, "counted twice"

    # ---- what must hold

    def made(self) -> dict[str, dict[int, Manifest]]:
        """All steps that ever were, removed ones too, by model."""
        found: dict[str, dict[int, Manifest]] = {}
        for key, data in sorted(self.store.keys.items()):  # "removed" before "steps", which counts
            if match := KEY.fullmatch(key):
                found.setdefault(match[1], {})[int(match[3])] = parsed(data)
        return found

    def removed(self, name: str) -> set[int]:
        keys = filter(None, map(KEY.fullmatch, self.store.keys))
        return {int(key[3]) for key in keys if key[1] == name and key[2] == "removed"}

    def there(self, name: str) -> list[int]:
        keys = filter(None, map(KEY.fullmatch, self.store.keys))
        found = {int(key[3]) for key in keys if key[1] == name and key[2] == "steps"}
        return sorted(found - self.removed(name))

    def check(self) -> None:
        made = self.made()
        for name, steps in made.items():
            for number, manifest in steps.items():
                given = self.given.setdefault((name, number), manifest.call_id)
                assert given == manifest.call_id, f"step {number} of {name} was given twice"
            calls = [manifest.call_id for manifest in steps.values()]
            assert len(calls) == len(set(calls)), f"a call of {name} is counted twice: {calls}"
            begins = [number for number, one in steps.items() if one.kind != "train"]
            assert begins == [min(steps)], f"{name} has the beginnings {begins}"
            assert sorted(steps) == list(range(min(steps), max(steps) + 1)), f"a gap in {name}"
            newest = max(self.there(name), default=-1)
            assert newest >= self.highest.get(name, -1), f"the newest of {name} went back"
            self.highest[name] = newest
        for (name, call), step in self.acknowledged.items():
            stands = made.get(name, {}).get(step)
            assert stands is not None, f"step {step} of {name} is lost"
            assert stands.call_id == call, f"step {step} of {name} is of another call"
        for name, call in self.refused:
            calls = [manifest.call_id for manifest in made[name].values()]
            assert call not in calls, f"{call} was told that it does not count"

    def check_end(self) -> None:
        made = self.made()
        for name in made:
            for step in self.there(name):
                for path, blob in made[name][step].files.items():
                    assert blob in self.store.content, f"{name}@{step} has lost {path}"


class Server:
    """What a server does with the store, in the order in which programs.py does it."""

    def __init__(
        self,
        games: Games,
        me: str,
        calls: Sequence[str],
        *,
        name: ModelName = NAME,
        keep: Retention | None = None,
        made: str = "",
    ) -> None:
        self.games = games
        self.me = me
        self.calls = calls
        self.name = name
        self.steps = games.of(name)
        self.keep = keep
        self.made = made
        """The content of its steps, where it is always the same."""

    def run(self) -> None:
        try:
            self.register()
        except ConflictError:  # the name was taken for content that is gone
            assert not self.games.there(str(self.name))
            return
        for call in self.calls:
            try:
                self.train(call)
            except RivalError:
                self.games.refused.add((str(self.name), call))
                break
        self.games.run.call("end", lambda: None)

    def register(self) -> None:
        newest = self.steps.newest()
        if newest is None:
            draft = self.games.draft(0, "init", "init", self.name)
            try:
                newest = self.steps.commit(draft, self.games.folder("zero"))
            except ConflictError:
                if (newest := self.steps.newest()) is None:
                    raise
        self.newest, self.known = newest, self.steps.calls()

    def train(self, call: str) -> None:
        step = self.newest.step + 1
        if (done := self.known.get(call)) is not None:
            self.games.acknowledge(call, done, self.name)
            return
        if (rival := self.steps.find(step)) is not None:
            if (done := self.steps.calls().get(call)) is None:
                raise superseded(rival)
            self.games.acknowledge(call, done, self.name)
            self.register()
            return
        folder = self.games.folder(self.made or f"{call}-{self.me}")
        self.newest = self.steps.commit(self.games.draft(step, call, name=self.name), folder)
        self.known[call] = step
        self.games.acknowledge(call, step, self.name)
        if self.keep is not None:
            prune(self.steps, self.keep)

    def actor(self, *, again: bool = True, may_crash: bool = True) -> Actor:
        """Killed, it is started again with the same calls."""
        return Actor(self.me, self.run, self.again if again else None, may_crash)

    def again(self) -> None:
        left = [call for call in self.calls if (str(self.name), call) not in self.games.refused]
        Server(self.games, self.me, left, name=self.name, keep=self.keep, made=self.made).run()


def remove(games: Games, *steps: int, name: ModelName = NAME) -> Actor:
    def work() -> None:
        for step in steps:
            with suppress(ConflictError, NotFoundError):
                games.of(name).delete(step)

    return Actor("rm", work)


def thin_out(games: Games, who: str = "prune", keep: Retention = ONE) -> Actor:
    return Actor(who, lambda: prune(games.of(), keep) and None)


collect_garbage_of = collect_garbage


def collect(games: Games, who: str = "gc", hours: float = 25) -> Actor:
    """A day later, and the question whether to go on stands open for another day."""

    def work() -> None:
        games.later()
        garbage = find_garbage(games.store)
        games.later()
        collect_garbage_of(games.store, garbage)

    return Actor(who, work)


def fork(games: Games, step: int | None = None, to: ModelName = COPY) -> Actor:
    def work() -> None:
        try:
            made = games.of().fork(to, step)
        except (ConflictError, NotFoundError):
            return
        games.acknowledge(made.call_id, made.step, to)

    return Actor("fork", work)


def push(games: Games, to: ModelName = COPY) -> Actor:
    def work() -> None:
        draft = games.draft(0, "pushed", "push", to)
        try:
            games.of(to).commit(draft, games.folder("pushed"))
        except ConflictError:
            return
        games.acknowledge("pushed", 0, to)

    return Actor("push", work)


def read(games: Games) -> Actor:
    """Looks which step is the newest, and which there are."""

    def work() -> None:
        for look in (lambda: games.of().newest().step, lambda: games.of().steps()[-1]):  # type: ignore[union-attr]
            before = games.there(str(NAME))[-1]
            assert look() >= before, "the newest went back for a reader"

    return Actor("reader", work)


@dataclass(frozen=True)
class Clock:
    """In the place of `datetime`."""

    def now(self, zone: tzinfo) -> datetime:
        return Games.now.store.now


@dataclass(frozen=True)
class Name:
    """In the place of a UUID: the same in each run."""

    hex: str


def uuid4() -> Name:
    return Name(f"{Games.now.run.actor}-mark")


@pytest.fixture(autouse=True)
def same_in_each_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Games, "folders", tmp_path, raising=False)
    monkeypatch.setattr(checkpoints_module, "each", lambda work, items: list(map(work, items)))
    monkeypatch.setattr(checkpoints_module, "uuid4", uuid4)
    monkeypatch.setattr(checkpoints_module, "datetime", Clock())
    monkeypatch.setattr(upkeep_module, "datetime", Clock())


# ---- who comes to the store


def a_rival_that_prunes(games: Games) -> list[Actor]:
    """The adversary's: one server stops before its create, the other goes on and prunes."""
    games.have()
    return [
        Server(games, "A", ["a"], keep=ONE).actor(),
        Server(games, "B", ["b1", "b2", "b3"], keep=ONE).actor(),
    ]


def rivals_and_rm(games: Games) -> list[Actor]:
    games.have("x")
    return [
        Server(games, "A", ["a"]).actor(),
        Server(games, "B", ["b"]).actor(),
        remove(games, 2, 1, 0),
    ]


def one_call_at_two_servers(games: Games) -> list[Actor]:
    games.have()
    return [
        Server(games, "A", ["a", "a2"], keep=ONE).actor(),
        Server(games, "B", ["a", "b2"], keep=ONE).actor(),
    ]


def two_that_prune(games: Games) -> list[Actor]:
    games.have("x", "y")
    keep = Retention(keep_every=2)
    return [
        thin_out(games),
        thin_out(games, "prune too", keep),
        Server(games, "A", ["a"]).actor(),
        read(games),
    ]


def one_name_for_three(games: Games) -> list[Actor]:
    """Registered, forked to and pushed to at once."""
    games.have("x")
    return [Server(games, "A", ["a"], name=COPY).actor(), fork(games, 1), push(games)]


def a_fork_and_its_source(games: Games) -> list[Actor]:
    games.have("x", "y")
    return [fork(games, 1), remove(games, 1), collect(games)]


def a_step_of_old_content(games: Games) -> list[Actor]:
    """A step turns out as one did that is removed and collected."""
    Server(games, "before", ["x", "y"], made="same").run()
    Server(games, "before", ["z"]).run()
    games.of().delete(1)
    games.of().delete(2)
    return [
        Server(games, "A", ["a"], made="same").actor(may_crash=False),
        collect(games),
        remove(games, 3),
    ]


def a_beginning_and_gc(games: Games) -> list[Actor]:
    """Somebody begins, a day later there is a gc, somebody else finishes what was begun."""
    games.have("x", "y")
    return [
        fork(games, 1),
        Server(games, "A", [], name=COPY).actor(),
        remove(games, 1),
        collect(games),
    ]


SCENES = {
    scene.__name__: scene
    for scene in (
        a_rival_that_prunes,
        rivals_and_rm,
        one_call_at_two_servers,
        two_that_prune,
        one_name_for_three,
        a_fork_and_its_source,
        a_step_of_old_content,
        a_beginning_and_gc,
    )
}


def explored(scene: str, *, preemptions: int, crashes: int) -> Explored:
    make = partial(Games, cast=SCENES[scene])
    return explore(make, preemptions=preemptions, crashes=crashes)


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_promised_holds(scene: str) -> None:
    """With one that is stopped anywhere for as long as the others take, or one that is killed."""
    assert explored(scene, preemptions=1, crashes=0).runs > 50
    assert explored(scene, preemptions=0, crashes=1).runs > 50


@pytest.mark.slow
@pytest.mark.parametrize(("preemptions", "crashes"), [(2, 0), (1, 1)])
@pytest.mark.parametrize("scene", SCENES)
def test_what_is_promised_holds_further(scene: str, preemptions: int, crashes: int) -> None:
    assert explored(scene, preemptions=preemptions, crashes=crashes).runs > 500


# ---- and what it would look like if it did not hold


def a_removed_step_frees_its_number(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Checkpoints, step: int) -> None:
        remove_it(self, step)
        self.store.delete(f"{self.name}/steps/{step:06d}.json")

    remove_it = Checkpoints.delete
    patch.setattr(Checkpoints, "delete", delete)


def a_fork_does_not_use_what_it_names(patch: pytest.MonkeyPatch) -> None:
    def secure(self: Checkpoints, manifest: Manifest, folder: Path | None = None) -> None:
        if manifest.kind != "fork":
            really(self, manifest, folder)

    really = Checkpoints._secure
    patch.setattr(Checkpoints, "_secure", secure)


def nobody_looks_after_the_manifest(patch: pytest.MonkeyPatch) -> None:
    def secure(self: Checkpoints, manifest: Manifest, folder: Path | None = None) -> None:
        if f"{manifest.name}/steps/{manifest.step:06d}.json" not in Games.now.store.keys:
            really(self, manifest, folder)

    really = Checkpoints._secure
    patch.setattr(Checkpoints, "_secure", secure)


def what_is_removed_is_listed_last(patch: pytest.MonkeyPatch) -> None:
    def steps(self: Checkpoints) -> list[int]:
        there = self._numbers("steps")
        return sorted(set(there) - set(self._numbers("removed")))

    patch.setattr(Checkpoints, "steps", steps)


def a_model_may_begin_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoints_module, "BEGINS", ())


def garbage_is_judged_by_the_time_of_the_answer(patch: pytest.MonkeyPatch) -> None:
    def collect(store: MemoryStore, garbage: Garbage) -> list[Blob]:
        before = Games.now.store.now - GRACE
        return collect_garbage(store, replace(garbage, before=before))

    patch.setitem(globals(), "collect_garbage_of", collect)


def garbage_is_what_no_step_names(patch: pytest.MonkeyPatch) -> None:
    def beginning(self: Checkpoints) -> Manifest:
        raise NotFoundError("it is not asked for")

    patch.setattr(Checkpoints, "beginning", beginning)


def the_newest_is_known_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    def delete(self: Checkpoints, step: int) -> None:
        if step == self._numbers("steps")[-1]:
            raise ConflictError("the newest")
        left = self.read(step).model_dump_json().encode()
        self.store.create(f"{self.name}/removed/{step:06d}.json", left)

    patch.setattr(Checkpoints, "delete", delete)


@pytest.mark.parametrize(
    ("seed", "scene", "what"),
    [
        (a_removed_step_frees_its_number, a_rival_that_prunes, "given twice"),
        (a_fork_does_not_use_what_it_names, a_fork_and_its_source, "has lost"),
        (nobody_looks_after_the_manifest, a_step_of_old_content, "has lost"),
        (what_is_removed_is_listed_last, two_that_prune, "went back for a reader"),
        (a_model_may_begin_twice, one_name_for_three, "has the beginnings"),
        (garbage_is_judged_by_the_time_of_the_answer, a_fork_and_its_source, "has lost"),
        (garbage_is_what_no_step_names, a_fork_and_its_source, "has lost"),
        (the_newest_is_known_before_it_is_read, rivals_and_rm, "went back"),
    ],
)
def test_a_fault_is_found(
    seed: Callable[[pytest.MonkeyPatch], None],
    scene: Callable[[Games], Sequence[Actor]],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed(monkeypatch)
    with pytest.raises(Violation, match=what):
        explored(scene.__name__, preemptions=1, crashes=0)
