"""What providers have in common."""

from __future__ import annotations

from art_cloud.clusters.providers import kit

NOISE = [f"Loading weights: {percent}%" for percent in range(30)]


def test_of_a_server_that_told_why_it_ends_nothing_else_is_quoted() -> None:
    lines = [*NOISE, "art-server: The base model 'x' can't be read.", "It has no config.json."]
    assert str(kit.ended("The server of one ended", lines)) == (
        "The server of one ended. The last lines of what it wrote:\n"
        "  art-server: The base model 'x' can't be read.\n"
        "  It has no config.json.\n"
        "Mend what they name, then start it again."
    )


def test_of_one_that_told_nothing_the_last_lines_are() -> None:
    message = str(kit.ended("The server of one ended", NOISE))
    assert "  Loading weights: 15%\n" in message
    assert "Loading weights: 14%" not in message
    assert "(nothing)" in str(kit.ended("The server of one ended", []))
