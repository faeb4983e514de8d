from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cloud.clusters.costs import Usage, choose, make_receipt
from art_cloud.clusters.spec import CAP_SECONDS, ClusterSpec, Offer
from art_cloud.shared.errors import ConfigError
from art_cloud.shared.limits import parse_deadline, parse_duration, reserve, words

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def offer(price: float, region: str = "here") -> Offer:
    return Offer(provider="cloud", region=region, price_per_hour=price, machine="H100")


def spec(**fields: object) -> ClusterSpec:
    return ClusterSpec.model_validate({"provider": "cloud", "store": "s3://b"} | fields)


def test_the_cheapest_offer_is_chosen() -> None:
    assert choose(spec(), [offer(3), offer(2), offer(4)]) == offer(2)
    assert choose(spec(max_hourly=2), [offer(3), offer(2)]) == offer(2)


def test_what_is_too_dear_names_the_cheapest() -> None:
    with pytest.raises(ConfigError, match=r"under \$1\.50 an hour.* H100 in east at \$2\.00"):
        choose(spec(max_hourly=1.5), [offer(3), offer(2, "east")])


def test_no_machine_at_all() -> None:
    with pytest.raises(ConfigError, match="cloud has no machine for this"):
        choose(spec(), [])


def test_a_budget_needs_a_price_and_some_time() -> None:
    with pytest.raises(ConfigError, match="knows none of this machine"):
        choose(spec(budget=5), [offer(0)])
    with pytest.raises(ConfigError, match=r"\$0\.01 pays for 18 s"):
        choose(spec(budget=0.01), [offer(2)])
    assert choose(spec(budget=0.04), [offer(2)]) == offer(2)


def test_the_server_is_told_its_limits() -> None:
    told = spec(
        lease_seconds=300, budget=5, deadline=7200, offer=offer(2), launched_at=NOW
    ).server_arguments("one")
    given = dict(zip(told[::2], told[1::2], strict=True))
    assert given["--lease"] == "300"
    assert given["--idle"] == "900"
    assert (given["--budget"], given["--price"]) == ("5", "2")
    assert given["--deadline"] == "7200"
    assert float(given["--launched"]) == NOW.timestamp()
    assert not {"--budget", "--price", "--deadline"} & set(spec().server_arguments("one"))


def test_what_was_spent_is_told_in_seconds_of_this_machine_too() -> None:
    """The clock of the other one may be wrong."""
    launched = datetime.now(UTC) - timedelta(hours=1)
    limited = spec(budget=4, offer=offer(2), launched_at=launched)
    told = limited.server_arguments("one")
    assert 3600 <= float(told[told.index("--spent") + 1]) < 3660
    assert 3540 < limited.cap_seconds - CAP_SECONDS <= 3600
    assert spec(launched_at=launched).cap_seconds == math.inf


def test_a_point_in_time_is_kept_as_one() -> None:
    launched = datetime.now(UTC)
    point = parse_deadline((launched + timedelta(hours=2)).isoformat())
    limited = spec(deadline=point, launched_at=launched)
    assert limited.deadline_seconds == pytest.approx(7200)
    assert ClusterSpec.model_validate_json(limited.model_dump_json()) == limited
    assert parse_deadline("90m") == 5400
    with pytest.raises(ConfigError, match="has passed already"):
        parse_deadline("2020-01-01T12:00")
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_deadline("soon")


@pytest.mark.parametrize("text", ["0001-01-01T00:00+12:00", "9999-12-31T23:59-12:00"])
def test_a_point_in_time_that_no_calendar_has(text: str) -> None:
    with pytest.raises(ConfigError, match="beyond what a calendar has"):
        parse_deadline(text)


def test_what_is_over_is_over_when_its_server_begins_to_end() -> None:
    def aged(seconds: float) -> ClusterSpec:
        launched = datetime.now(UTC) - timedelta(seconds=seconds)
        return spec(budget=2, offer=offer(2), deadline=9999, launched_at=launched)

    assert aged(0).life_seconds == 3600
    assert not aged(3500).is_over
    assert aged(3541).is_over


def test_a_receipt_of_what_was_seen_to_its_end() -> None:
    usage = Usage(NOW, steps=4, tokens_trained=1000, tokens_sampled=20000)
    paid = spec(offer=offer(2), launched_at=NOW - timedelta(minutes=90))
    receipt = make_receipt("one", paid, usage, NOW, seen_to_end=True)
    assert receipt.cost == (3, 3)
    assert receipt.cost_per_step == 0.75
    assert receipt.summary == (
        "one: 1 h 30 m, $3.00 at $2.00 an hour, 4 steps ($0.750 each), 20,000 tokens sampled, "
        "1,000 trained on"
    )


def test_a_receipt_of_what_ended_unseen_says_between_what() -> None:
    launched = NOW - timedelta(hours=3)
    seen = Usage(NOW - timedelta(hours=2), 0, 0, 0)
    paid = spec(offer=offer(2), launched_at=launched)
    assert make_receipt("one", paid, seen, NOW, seen_to_end=False).cost == (2, 6)
    limited = paid.model_copy(update={"budget": 5})
    assert make_receipt("one", limited, seen, NOW, seen_to_end=False).cost == (2, 5)
    unasked = make_receipt("one", paid, None, NOW, seen_to_end=False)
    assert unasked.cost == (0, 6)
    assert unasked.summary == (
        "one: between 0 s and 3 h, between $0.00 and $6.00 at $2.00 an hour, what it did is not "
        "known: its server was never asked"
    )


@pytest.mark.parametrize("seen_to_end", [True, False])
def test_a_clock_that_was_set_back_makes_no_receipt_of_less_than_was_seen(
    seen_to_end: bool,
) -> None:
    seen = Usage(NOW, 1, 0, 0)
    paid = spec(offer=offer(2), launched_at=NOW - timedelta(hours=3))
    yesterday = NOW - timedelta(days=1)
    assert make_receipt("one", paid, seen, yesterday, seen_to_end=seen_to_end).cost == (6, 6)
    assert make_receipt("one", paid, None, yesterday, seen_to_end=seen_to_end).cost == (0, 0)


@given(st.floats(0.01, 1e9))
def test_a_reserve_is_less_than_what_it_is_of(allowed: float) -> None:
    assert 0 < reserve(allowed) <= min(60, 0.1 * allowed)


@given(st.integers(1, 10**8))
def test_words_are_what_was_meant_to_the_second_unit(seconds: int) -> None:
    parts = words(seconds).split()
    meant = sum(
        parse_duration(f"{number}{unit}")
        for number, unit in zip(parts[::2], parts[1::2], strict=True)
    )
    unit = {"s": 1, "m": 1, "h": 60, "d": 3600}[parts[1]]
    assert 0 <= seconds - meant < max(unit, 1)
