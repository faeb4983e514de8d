"""A mailbox made on the spot, a question about it, and the tools to answer it."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from art_cloud.agents.tools import ToolResult
from art_cloud.rollouts.trajectory import Tools

PEOPLE = ("Joe", "Lee", "Pat", "Zoe")
TOPICS = {
    "trip": ("train", "Our train leaves at {}."),
    "flat": ("rent", "You can pay the rent until {}."),
    "birthday": ("party", "The party begins at {}."),
    "tooth": ("dentist", "The dentist sees you at {}."),
    "film": ("movie", "Let us meet before the movie at {}."),
    "hair": ("barber", "The barber has time at {}."),
}
"""What a question calls it, what mails call it, and what they say."""
HOURS = tuple(str(hour) for hour in range(1, 7))
HITS = 3
QUICK = 3


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties},
        },
    }


TOOLS: Any = [
    _tool("search", "Find mails by words.", query="string"),
    _tool("read", "Open a hit.", hit="integer"),
    _tool("answer", "The hour, and the hit that says it.", text="string", hit="integer"),
]


class Mail(NamedTuple):
    sender: str
    subject: str
    body: str


class Mailbox:
    """A mail of each person on each topic, and one question. The same for the same seed."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311
        mails = [
            (Mail(person, subject, body.format(hour)), hour, topic)
            for person in PEOPLE
            for topic, (subject, body) in TOPICS.items()
            for hour in [chance.choice(HOURS)]
        ]
        self.wanted, self.hour, topic = chance.choice(mails)
        self.question = f"About the {topic}: what hour did {self.wanted.sender} name?"
        chance.shuffle(mails)
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE mails USING fts5(sender, subject, body)")
        self._database.executemany(
            "INSERT INTO mails VALUES (?, ?, ?)", [mail for mail, _, _ in mails]
        )

    def search(self, query: str) -> list[Mail]:
        """The best mails with any word of `query`, by FTS5's bm25."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        if not words:
            return []
        found = self._database.execute(
            "SELECT * FROM mails WHERE mails MATCH ? ORDER BY rank, rowid LIMIT ?", (words, HITS)
        )
        return [Mail(*row) for row in found]


class Desk:
    """The tools of one rollout, and what was done with them. An `art_cloud.tools.ToolSession`."""

    tools: Tools = TOOLS

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.hits: list[Mail] = []
        self.found = False
        """The mail that was asked for was among the hits of a search."""
        self.read = False
        self.right = False
        self.source = False

    def done(self, turns: int) -> dict[str, bool]:
        """What the reward is made of. `quick`: all of it, in no more turns than it takes."""
        done = {name: getattr(self, name) for name in ("found", "read", "right", "source")}
        return done | {"quick": all(done.values()) and turns <= QUICK}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return self.act(name, arguments)

    def act(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        match name, dict(arguments):
            case "search", {"query": str(query)}:
                return self._search(query)
            case "read", {"hit": int(hit)} if 1 <= hit <= len(self.hits):
                mail = self.hits[hit - 1]
                self.read |= mail == self.mailbox.wanted
                return ToolResult(f"{mail.sender}: {mail.body}")
            case "answer", {"text": str(text), "hit": int(hit)}:
                self.right = text.strip() == self.mailbox.hour
                self.source = self.hits[hit - 1 : hit] == [self.mailbox.wanted]
                return ToolResult("Thanks.")
        return ToolResult("No such tool, argument or hit.", failed=True)

    def _search(self, query: str) -> ToolResult:
        self.hits = self.mailbox.search(query)
        self.found |= self.mailbox.wanted in self.hits
        lines = [f"{n} {mail.sender}: {mail.subject}" for n, mail in enumerate(self.hits, 1)]
        return ToolResult("\n".join(lines) or "No hit.")
