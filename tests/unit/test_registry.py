from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest

from art_cloud.clusters.registry import Registry, Use, default_name, home, in_use
from art_cloud.clusters.spec import ClusterSpec, Offer
from art_cloud.shared.errors import ConfigError, NotFoundError, RegistryError
from art_cloud.shared.protocol import ServerInfo

SPEC = ClusterSpec(provider="local", store="file:///somewhere")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


def test_an_intent_is_there_for_the_next_process_to_read() -> None:
    record, fresh = Registry().claim("a", SPEC)
    assert fresh
    assert record.state == "starting"
    assert Registry().list() == [record]
    assert Registry().get("a") == record
    assert Registry().get("b") is None


def test_a_second_claim_finds_the_first_with_its_token() -> None:
    first, _ = Registry().claim("a", SPEC)
    second, fresh = Registry().claim("a", SPEC.model_copy(update={"store": "file:///elsewhere"}))
    assert not fresh
    assert second == first


def test_removing_a_record_leaves_a_later_one_of_the_same_name() -> None:
    registry = Registry()
    old, _ = registry.claim("a", SPEC)
    registry.remove(old)
    new, fresh = registry.claim("a", SPEC)
    assert fresh
    registry.remove(old)
    assert registry.list() == [new]


def test_only_the_owner_can_read_it_and_the_token_is_nowhere_else() -> None:
    record, _ = Registry().claim("a", SPEC)
    token = record.spec.token.get_secret_value()
    assert len(token) >= 32
    assert token not in repr(record) + str(record) + record.spec.model_dump_json()
    files = list(home().glob("clusters.sqlite*"))
    assert files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(home().stat().st_mode) == 0o700


def test_of_many_processes_that_claim_a_name_one_is_first() -> None:
    program = (
        "from art_cloud.clusters.registry import Registry\n"
        "from art_cloud.clusters.spec import ClusterSpec\n"
        "for i in range(20):\n"
        "    spec = ClusterSpec(provider='local', store='s')\n"
        "    record, fresh = Registry().claim(f'c{i}', spec)\n"
        "    print(i, record.spec.token.get_secret_value(), fresh)"
    )
    claims = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    lines = [line.split() for claim in claims for line in claim.communicate()[0].splitlines()]
    assert [claim.returncode for claim in claims] == [0] * 4
    assert len(lines) == 80
    for number in range(20):
        of_name = [(token, fresh) for i, token, fresh in lines if i == str(number)]
        assert len({token for token, _ in of_name}) == 1
        assert [fresh for _, fresh in of_name].count("True") == 1


def test_a_use_is_seen_by_others_until_its_process_ends() -> None:
    assert not in_use("a")
    program = (
        "from art_cloud.clusters.registry import Use\n"
        "use = Use('a'); print('used', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "used\n"
    mine = Use("a")
    assert in_use("a")
    mine.end()
    assert in_use("a")
    other.kill()
    other.communicate()
    assert not in_use("a")


def test_a_home_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    Use("a").end()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "file"))
    with pytest.raises(RegistryError, match="ART_CLOUD_HOME"):
        Registry().claim("a", SPEC)
    with pytest.raises(RegistryError, match="ART_CLOUD_HOME"):
        Use("a")
    assert not in_use("a")


def test_a_damaged_file_is_a_clear_error() -> None:
    Registry().claim("a", SPEC)
    Registry().path.write_bytes(b"no database" * 1000)
    with pytest.raises(RegistryError, match="can't be used: file is not a database"):
        Registry().list()
    with pytest.raises(RegistryError, match="can't be used: file is not a database"):
        Registry().claim("b", SPEC)


def _rewrite(statement: str, *values: str) -> None:
    with closing(sqlite3.connect(Registry().path)) as database, database:
        database.execute(statement, values)


def test_what_a_later_version_wrote_is_read_as_far_as_it_is_understood() -> None:
    priced = SPEC.model_copy(
        update={"offer": Offer(provider="local", region="here", price_per_hour=2.0)}
    )
    record, _ = Registry().claim("a", priced)
    written = json.loads(record.spec.model_dump_json())
    written |= {"heat": 3, "offer": written["offer"] | {"colour": "blue"}}
    _rewrite("UPDATE clusters SET spec = ?", json.dumps(written))
    _rewrite("ALTER TABLE clusters ADD COLUMN heat TEXT")
    assert Registry().list() == [record]
    other, fresh = Registry().claim("b", SPEC)
    assert fresh
    receipt = Registry().end(record, seen_to_end=True)
    _rewrite("UPDATE receipts SET receipt = json_set(receipt, '$.carbon', 1)")
    assert Registry().receipts() == [receipt]
    assert Registry().list() == [other]


@pytest.mark.parametrize(("field", "value"), [("spec", "{"), ("spec", "{}"), ("created_at", "x")])
def test_a_damaged_record_hides_no_other(
    capfd: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    name = f"damaged-{field}-{len(value)}"
    Registry().claim(name, SPEC)
    other, _ = Registry().claim("other", SPEC)
    _rewrite(f"UPDATE clusters SET {field} = ? WHERE name = '{name}'", value)
    assert Registry().list() == [other]
    assert Registry().get("other") == other
    told = " ".join(capfd.readouterr().err.split())
    assert f"What is recorded of the cluster {name} can't be understood" in told
    with pytest.raises(RegistryError, match=f"the cluster {name} can't be understood"):
        Registry().claim(name, SPEC)
    receipt = Registry().end(other, seen_to_end=True)
    _rewrite("INSERT INTO receipts VALUES ('c', '2020', '{')")
    assert Registry().receipts() == [receipt]


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_to_read_needs_nothing_that_can_be_written(mode: str) -> None:
    """Not a byte is written, nor a file made; also not of a file that an older version wrote."""
    record, _ = Registry().claim("a", SPEC)
    Registry().add_phase(record, "boot", 1.0)
    with closing(sqlite3.connect(Registry().path)) as database:
        database.execute(f"PRAGMA journal_mode = {mode}")
    before = {path: path.stat().st_mtime_ns for path in home().rglob("*")}
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from art_cloud.clusters.registry import *\n"
        "from art_cloud.clusters.spec import ClusterSpec\n"
        "from art_cloud.shared.errors import RegistryError\n"
        "registry = Registry(); [record] = registry.list()\n"
        "assert registry.phases(record) == [('boot', 1.0)] and registry.usage(record) is None\n"
        "assert registry.receipts() == [] and not in_use('a')\n"
        "try: registry.end(record, seen_to_end=True)\n"
        "except RegistryError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "can't be used" in done.stdout) == (0, True), done.stderr
    assert Registry().list() == [record]
    if mode == "DELETE":
        assert {path: path.stat().st_mtime_ns for path in home().rglob("*")} == before


def test_a_writer_that_was_killed_in_the_middle_keeps_nobody_from_reading() -> None:
    record, _ = Registry().claim("a", SPEC)
    program = (
        "import os, signal, sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('PRAGMA cache_size = 1')\n"
        "database.execute('PRAGMA cache_spill = 1')\n"
        "database.execute('BEGIN IMMEDIATE')\n"
        "database.execute('DELETE FROM clusters')\n"
        "for n in range(2000):\n"
        "    database.execute('INSERT INTO phases VALUES (?, ?, ?, 0)', ['x' * 500] * 3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(Registry().path)], check=False)
    assert Path(f"{Registry().path}-journal").exists()
    assert Registry().list() == [record]


def test_a_server_that_replaces_another_has_a_token_of_its_own() -> None:
    registry = Registry()
    record, _ = registry.claim("a", SPEC)
    renewed = registry.renew_token(record)
    assert renewed.key == record.key
    assert renewed.spec.token != record.spec.token
    assert registry.get("a") == renewed == registry.current(record)
    assert registry.renew_token(record) == renewed  # another program was first
    assert registry.renew_token(renewed).spec.token != renewed.spec.token
    registry.remove(record)
    with pytest.raises(NotFoundError):
        registry.renew_token(record)


@pytest.mark.parametrize("name", ["", "../up", "a b", "a/b", "x" * 65])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid name"):
        Registry().claim(name, SPEC)


def test_the_default_name_is_the_same_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "Zoë O'Neil")
    assert default_name("local") == default_name("local") == "art-Zo-O-Neil-local"


def server_info(started: str, steps: int) -> ServerInfo:
    return ServerInfo(
        version="1",
        protocol=1,
        base_model=None,
        engine="transformers",
        device="cpu",
        store="s",
        policies=[],
        jobs_queued=0,
        requests_running=0,
        requests_waiting=0,
        training=None,
        started_at=datetime.fromisoformat(started),
        steps_made=steps,
        tokens_sampled=100 * steps,
        tokens_trained=10 * steps,
    )


def test_what_servers_say_adds_up_to_a_receipt_that_stays() -> None:
    registry = Registry()
    record, _ = registry.claim("a", SPEC)
    assert record.spec.launched_at == record.created_at
    assert registry.usage(record) is None
    first, second = "2026-11-20T12:00:00Z", "2026-11-20T13:00:00Z"
    for said in (server_info(first, 2), server_info(first, 3), server_info(second, 1)):
        registry.note(record, said)  # the second one replaced a lost machine
    usage = registry.usage(record)
    assert usage is not None
    assert usage[1:] == (4, 40, 400)

    receipt = registry.end(record, seen_to_end=True)
    assert (receipt.steps, receipt.tokens_trained, receipt.tokens_sampled) == (4, 40, 400)
    assert Registry().list() == []
    again, fresh = registry.claim("a", SPEC)
    assert fresh
    assert registry.usage(again) is None
    registry.end(again, seen_to_end=False)
    assert [one.steps for one in Registry().receipts()] == [4, None]
    registry.end(record, seen_to_end=True)  # a second `down` at the same time
    assert len(Registry().receipts()) == 2


def test_phases_are_of_one_launch() -> None:
    registry = Registry()
    old, _ = registry.claim("a", SPEC)
    registry.add_phase(old, "provision", 1.5)
    registry.add_phase(old, "boot", 2.5)
    assert Registry().phases(old) == [("provision", 1.5), ("boot", 2.5)]
    registry.end(old, seen_to_end=True)
    new, _ = registry.claim("a", SPEC)
    assert registry.phases(new) == []


def test_a_state_is_set_of_this_launch_only() -> None:
    registry = Registry()
    old, _ = registry.claim("a", SPEC)
    registry.remove(old)
    registry.claim("a", SPEC)
    registry.set_state(old, "running")
    assert [record.state for record in registry.list()] == ["starting"]
    assert registry.receipts() == []
