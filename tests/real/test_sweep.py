"""What `art-cloud sweep` ends and what it leaves, with real servers; offers, receipts, status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.providers import get_provider, local
from art_cloud.clusters.registry import Registry, Use
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.clusters.up import store_url
from art_cloud.shared.errors import ConfigError


@pytest.fixture(autouse=True)
async def cluster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    home = tmp_path / "home"
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(local, "ENDING_SECONDS", 1.0)
    monkeypatch.setattr(fleet, "STATUS_SECONDS", 10.0)
    monkeypatch.setattr(sweep, "ANSWER_SECONDS", 10.0)
    monkeypatch.setattr(sweep, "PATIENCE_SECONDS", 2.0)
    yield home
    for one in await fleet.status():
        await fleet.down(one.name)
    assert await get_provider("local").list() == []


async def art_cloud(*arguments: str, answer: str | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments, input=answer)


async def pid_of(name: str) -> int:
    [instance] = [one for one in await get_provider("local").list() if one.name == name]
    return int(instance.detail.removeprefix("pid "))


async def start_and_forget(name: str) -> None:
    """As `up` does that is killed once the server's process is there."""
    spec = ClusterSpec(provider="local", store=store_url("local", None))
    record, _ = Registry().claim(name, spec)
    await get_provider("local").launch(record.spec, name)


async def swept() -> dict[str, list[str]]:
    done = await art_cloud("sweep", "--yes", "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


async def test_a_cluster_that_is_leased_stays_and_a_lost_launch_goes(cluster_home: Path) -> None:
    async with art.up("local", name="used", price_per_hour=3.6, budget=100, keep=True) as backend:
        await start_and_forget("lost")
        refused = await art_cloud("sweep", answer="n\n")
        assert refused.exit_code == 1
        assert "End lost?" in refused.stderr
        assert "a program of this machine uses it" in refused.stdout
        assert await swept() == {"ended": ["lost"], "kept": ["used"]}
        assert (await backend.info()).version == art.__version__
    assert await swept() == {"ended": [], "kept": ["used"]}
    assert "leased for" in (await art_cloud("sweep")).stdout

    shown = (await art_cloud("status", "used")).stdout
    for part in ("lease", "idle", "budget", "of $100.00", "at $3.60 an hour", "0 steps"):
        assert part in shown
    told = json.loads((await art_cloud("status", "used", "--json")).stdout)
    assert told["price_per_hour"] == 3.6
    assert told["cost"] > 0
    assert [one["phase"] for one in told["timeline"]] == ["provision", "boot"]
    assert "in all" in (await art_cloud("status", "used", "--timeline")).stdout
    clocks = {clock["name"]: clock for clock in told["server"]["clocks"]}
    assert clocks.keys() == {"lease", "idle", "budget"}

    process = psutil.Process(await pid_of("used"))
    process.suspend()  # it is there, and does not answer: nobody's lease is alive
    assert await swept() == {"ended": ["used"], "kept": []}
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    listed = json.loads((await art_cloud("receipts", "--json")).stdout)
    assert [(one["name"], one["steps"]) for one in listed] == [("used", 0), ("lost", None)]
    assert "In all: $" in (await art_cloud("receipts")).stdout


async def test_what_is_not_recorded_is_found_and_judged_by_its_answer(cluster_home: Path) -> None:
    state = cluster_home / "clusters" / "stray"
    command = [sys.executable, "-m", "art_server", "--name", "stray", "--state", str(state)]
    stray = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"ART_CLOUD_TOKEN": "t"}, start_new_session=True
    )
    while not (state / "endpoint.json").exists():
        await asyncio.sleep(0.05)
    assert await swept() == {"ended": [], "kept": ["stray"]}
    assert "has a lease of its own" in (await art_cloud("sweep")).stdout
    stray.send_signal(signal.SIGSTOP)
    assert await swept() == {"ended": ["stray"], "kept": []}
    assert await stray.wait() == -signal.SIGKILL


async def test_another_that_took_the_name_while_the_question_stood_open_is_left() -> None:
    provider = get_provider("local")
    await start_and_forget("lost")
    found, _ = await sweep.look()
    assert [one.kept for one in found] == [None]
    await fleet.down("lost")
    async with art.up("local", name="lost") as backend:
        judged, failures = await sweep.end(found)
        assert [one.kept for one in judged] == ["it is another one by now"]
        assert failures == []
        assert (await backend.info()).version == art.__version__
    assert await provider.list() == []
    judged, _ = await sweep.end(found)
    assert [one.kept for one in judged] == ["it has ended meanwhile"]


async def test_one_that_is_used_by_now_is_left() -> None:
    await start_and_forget("lost")
    found, _ = await sweep.look()
    use = Use("lost")
    judged, _ = await sweep.end(found)
    assert [one.kept for one in judged] == ["a program of this machine uses it"]
    use.end()
    judged, _ = await sweep.end(found)
    assert [one.kept for one in judged] == [None]
    assert await get_provider("local").list() == []


async def test_a_full_disk_keeps_nothing_running(cluster_home: Path) -> None:
    for name in ("one", "two"):
        await start_and_forget(name)
        psutil.Process(await pid_of(name)).suspend()  # so that it never comes to listen
    program = (
        "from art_cloud.clusters.providers import local; local.ENDING_SECONDS = 1\n"
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from art_cloud.cli.main import main; main()"
    )

    async def on_a_full_disk(*arguments: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
        return process.returncode, said.decode(), " ".join(errors.decode().split())

    code, said, _ = await on_a_full_disk("status", "--json")
    assert (code, [one["name"] for one in json.loads(said)]) == (0, ["one", "two"])
    code, _, errors = await on_a_full_disk("down", "one")
    assert code == 1
    assert "one is ended, but stays on the list of clusters" in errors
    assert [one.name for one in await get_provider("local").list()] == ["two"]
    code, _, errors = await on_a_full_disk("sweep", "--yes")
    assert code == 1
    assert "two is ended, but stays on the list of clusters" in errors
    assert await get_provider("local").list() == []
    assert sorted((await swept())["ended"]) == ["one", "two"]


async def test_a_record_of_nothing_is_cleared() -> None:
    Registry().claim("never", ClusterSpec(provider="local", store="file:///s"))
    shown = await art_cloud("status")
    assert "its launch broke off" in " ".join(shown.stdout.split())
    assert await swept() == {"ended": ["never"], "kept": []}
    assert Registry().list() == []
    assert (await art_cloud("sweep")).stdout == "Nothing of ours runs anywhere.\n"


async def test_nothing_is_started_that_costs_too_much() -> None:
    for limits, message in (
        ({"max_hourly": 1.0, "price_per_hour": 2}, r"no machine under \$1\.00 an hour"),
        ({"budget": 5.0}, "A budget needs a price"),
        ({"budget": -1.0}, r"up\(budget\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            await art.up("local", **limits)  # type: ignore[arg-type]
    refused = await art_cloud("up", "--max-hourly", "1", "-o", "price_per_hour=2")
    assert refused.exit_code == 1
    assert "The cheapest is in this machine at $2.00 an hour" in refused.stderr
    assert Registry().list() == []
    assert await get_provider("local").list() == []


async def test_offers_are_listed_with_the_price_of_a_run() -> None:
    listed = await art_cloud("offers", "local", "--hours", "5", "-o", "price_per_hour=2")
    assert "$2.00" in listed.stdout
    assert "$10.00" in listed.stdout
    [offer] = json.loads((await art_cloud("offers", "local", "--json")).stdout)
    assert (offer["provider"], offer["price"]) == ("local", 0)
    none = await art_cloud("offers", "local", "--gpu", "H100")
    assert none.exit_code == 1
    assert "local: A local cluster: gpu: not among its options" in none.stderr
