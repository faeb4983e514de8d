"""Every order in which actors can come to a shared thing, tried one after the other.

An actor is a function in a thread of its own. Whatever it does with the shared thing goes through
`Run.call`, which is a scheduling point: there the actor stands still until it is chosen to go on,
or crashes. One actor runs at a time, so a run is a list of choices, and the same choices give the
same run. `explore` goes through the tree of choices depth first, each run from its beginning, as
CHESS does (Musuvathi et al., Finding and Reproducing Heisenbugs in Concurrent Programs, OSDI 2008).

What an actor does next is a function of what its calls gave it. So two runs that have led to the
same shared state, and each actor to the same answers, go on alike: only one of them is followed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")


class Crashed(BaseException):
    """Raised in an actor that goes no further; not an `Exception`, so that nobody handles it."""


class Violation(AssertionError):
    """What must always hold did not, with the run that led there."""


class World(Protocol):
    """What the actors share, made anew for each run."""

    def actors(self) -> Sequence[Actor]: ...

    def state(self) -> Hashable:
        """All that an actor's later calls may depend on."""
        ...

    def check(self) -> None:
        """What holds at every moment. Raises `AssertionError`."""
        ...

    def check_end(self) -> None:
        """What holds when no actor is left."""
        ...


@dataclass(eq=False)
class Actor:
    name: str
    work: Callable[[], None]
    again: Callable[[], None] | None = None
    """What is done in its stead once it has crashed."""
    may_crash: bool = True
    waits_for: str = ""
    """What it is about to do."""
    looks: bool = False
    """Whether that changes nothing."""
    answers: int = 0
    """A hash of all that it was given."""
    error: BaseException | None = None
    over: bool = False
    crashed: bool = False
    go: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Explored:
    runs: int
    states: int


class Run:
    """One run. Its world calls `call`."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._actors: list[Actor] = []
        self._here = threading.local()
        self._stands = threading.Lock()
        self._stands.acquire()

    @property
    def actor(self) -> str:
        """Who asks; "" for whoever looks on."""
        found: Actor | None = getattr(self._here, "actor", None)
        return found.name if found else ""

    def call(self, what: str, work: Callable[[], T], *, looks: bool = False) -> T:
        """Do `work` on the shared thing, in one go, when this actor is chosen to.

        Args:
            looks: it changes nothing. Then to crash before it is the same as to crash after it.
        """
        actor: Actor | None = getattr(self._here, "actor", None)
        if actor is None:
            return work()
        if actor.crashed:
            raise Crashed
        actor.waits_for, actor.looks = what, looks
        self._stand(actor)
        try:
            answer: object = work()
            return answer  # type: ignore[return-value]
        except Exception as error:
            answer = type(error)
            raise
        finally:
            actor.answers = hash((actor.answers, what, repr(answer)))

    def _stand(self, actor: Actor) -> None:
        self._stands.release()
        actor.go.acquire()
        if actor.crashed:
            raise Crashed

    def begin(self, actor: Actor) -> None:
        """Let it come to its first call."""

        def work() -> None:
            self._here.actor = actor
            try:
                actor.work()
            except Crashed:
                pass
            except BaseException as error:
                actor.error = error
            actor.over = True
            self._stands.release()

        actor.go.acquire()
        self._actors.append(actor)
        threading.Thread(target=work, daemon=True).start()
        self._stands.acquire()

    def go_on(self, actor: Actor) -> None:
        self.steps.append(f"{actor.name}: {actor.waits_for}")
        self._move(actor)

    def crash(self, actor: Actor) -> None:
        self.steps.append(f"{actor.name} crashes before it does: {actor.waits_for}")
        actor.crashed = True
        self._move(actor)
        if actor.again is not None:
            self.begin(Actor(f"{actor.name}'", actor.again, may_crash=False))

    def _move(self, actor: Actor) -> None:
        actor.go.release()
        self._stands.acquire()
        if actor.error is not None:
            raise actor.error

    def left(self) -> list[Actor]:
        return [actor for actor in self._actors if not actor.over]

    def abandon(self) -> None:
        for actor in self.left():
            actor.crashed = True
            actor.go.release()
            self._stands.acquire()

    def position(self) -> Hashable:
        return tuple((actor.name, actor.answers, actor.over) for actor in self._actors)


@dataclass(frozen=True)
class Budget:
    preemptions: int
    """How often an actor may be kept waiting that could go on."""
    crashes: int

    def covers(self, other: Budget) -> bool:
        return self.preemptions >= other.preemptions and self.crashes >= other.crashes


@dataclass(frozen=True)
class Choice:
    actor: Actor
    crash: bool
    left: Budget


class Explorer:
    def __init__(self, make: Callable[[Run], World], budget: Budget) -> None:
        self.make = make
        self.budget = budget
        self.seen: dict[Hashable, list[Budget]] = {}
        self.runs = 0

    def explore(self, most: int) -> Explored:
        branches: list[list[int]] = [[]]
        while branches:
            assert self.runs < most, f"{most} runs, and {len(branches)} branches are left"
            path = branches.pop()
            widths = self._run(path)
            taken = path + [0] * (len(widths) - len(path))
            for depth in range(len(path), len(widths)):
                branches += [[*taken[:depth], other] for other in range(1, widths[depth])]
        return Explored(self.runs, len(self.seen))

    def _run(self, path: list[int]) -> list[int]:
        """Go along `path`, then on with the first choice each time, until all is over or was seen
        before. Returns how many choices there were each time."""
        self.runs += 1
        run, widths = Run(), []
        world = self.make(run)
        budget, current = self.budget, None
        try:
            for actor in world.actors():
                run.begin(actor)
            while run.left():
                world.check()
                if len(widths) >= len(path) and self._was_seen(run, world, current, budget):
                    return widths
                choices = _choices(run, current, budget)
                choice = choices[path[len(widths)] if len(widths) < len(path) else 0]
                widths.append(len(choices))
                budget, current = choice.left, choice.actor
                (run.crash if choice.crash else run.go_on)(choice.actor)
            world.check()
            world.check_end()
        except Exception as error:
            lines = "\n  ".join(run.steps)
            raise Violation(f"run {self.runs}: {error!r}, after\n  {lines}") from error
        finally:
            run.abandon()
        return widths

    def _was_seen(self, run: Run, world: World, current: Actor | None, budget: Budget) -> bool:
        who = current.name if current and not current.over and budget.preemptions < FREE else ""
        before = self.seen.setdefault((world.state(), run.position(), who), [])
        if any(one.covers(budget) for one in before):
            return True
        before.append(budget)
        return False


FREE = 1000
"""So many preemptions are as good as any number."""


def _choices(run: Run, current: Actor | None, budget: Budget) -> list[Choice]:
    """Who goes on, or crashes: who did last, at no cost, comes first."""
    left = run.left()
    stays = current is not None and not current.over
    free = not stays or budget.preemptions >= FREE
    others = Budget(budget.preemptions - (not free), budget.crashes)
    found = [Choice(current, False, budget)] if stays and current else []
    if free or budget.preemptions:
        found += [Choice(actor, False, others) for actor in left if actor is not current]
    if budget.crashes:
        dead = Budget(budget.preemptions, budget.crashes - 1)
        found += [
            Choice(actor, True, dead) for actor in left if actor.may_crash and not actor.looks
        ]
    return found


def explore(
    make: Callable[[Run], World],
    *,
    preemptions: int = FREE,
    crashes: int = 0,
    most: int = 1_000_000,
) -> Explored:
    """Try every run of the actors of `make`'s world with so many preemptions and crashes.

    Raises:
        Violation: what must hold did not.
        AssertionError: there are more than `most` runs.
    """
    return Explorer(make, Budget(preemptions, crashes)).explore(most)
