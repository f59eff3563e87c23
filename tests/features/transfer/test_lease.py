"""Leases: granted, renewed forward only, ended once, fenced while somebody reads (PDX-8, PDX-9)."""

import random

import pytest

from octavo.features.transfer.control.lease import LEASE_S, RENEWAL, Ended, LeaseEnd, LeaseTable


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return LeaseTable(clock)


def test_a_lease_that_nobody_renews_ends_after_its_time(table, clock):
    assert table.grant("a", "decode-1") == 100 + LEASE_S == table.next_deadline()
    clock.now += LEASE_S - 0.1
    assert table.expire() == ()
    clock.now += 0.1
    assert table.expire() == (Ended("a", LeaseEnd.EXPIRED),) and "a" not in table
    assert table.expire() == () and table.next_deadline() is None


def test_heartbeats_move_the_end_forward_only(table, clock):
    table.grant("a")
    assert table.renew("a") and table.next_deadline() == 100 + LEASE_S  # two thirds from now would be sooner
    clock.now += 20
    assert table.renew("a") and table.next_deadline() == 120 + RENEWAL * LEASE_S
    clock.now -= 15  # a clock that was set back
    assert table.renew("a") and table.next_deadline() == 120 + RENEWAL * LEASE_S


def test_expiry_looks_at_all_leases(table, clock):
    for name in "abc":
        table.grant(name)
        clock.now += 1
    clock.now += 25
    table.renew("a")
    clock.now += 10
    assert {ended.lease_id for ended in table.expire()} == {"b", "c"}


def test_what_is_being_read_stays_until_the_reader_is_done(table, clock):
    table.grant("a")
    assert table.begin_read("a", "socket 1") and table.begin_read("a", "socket 2")
    clock.now += 2 * LEASE_S
    assert table.expire() == () and len(table.fenced()) == 1
    assert not table.renew("a") and not table.begin_read("a", "socket 3")
    assert table.end_read("a", "socket 1") == ()
    assert table.end_read("a", "socket 2") == (Ended("a", LeaseEnd.EXPIRED),)
    assert not table.begin_read("a", "socket 4") and len(table) == 0


def test_it_ends_once_however_often_it_is_said(table):
    table.grant("a")
    assert table.end("a", LeaseEnd.DONE) == (Ended("a", LeaseEnd.DONE),)
    assert table.end("a", LeaseEnd.DONE) == table.end("a", LeaseEnd.ABORTED) == table.end_read("a", "x") == ()
    assert not table.renew("a") and table.num_ignored == 4
    assert table.counts == {LeaseEnd.DONE: 1, LeaseEnd.ABORTED: 0, LeaseEnd.EXPIRED: 0}


def test_an_id_is_granted_once_at_a_time(table):
    table.grant("a")
    with pytest.raises(ValueError, match="granted already"):
        table.grant("a")
    table.end("a", LeaseEnd.ABORTED)
    table.grant("a")


def life(seed, steps):
    """Grants, heartbeats, readers, ends and duplicates in any order, on a clock that may jump."""
    chance, clock = random.Random(seed), Clock()
    table, known, reading, ended = LeaseTable(clock), {}, {}, {}
    count = 0

    def note(gone):
        for each in gone:
            assert each.lease_id in known and each.lease_id not in ended
            assert not reading.get(each.lease_id), "blocks were given up under a reader"
            ended[each.lease_id] = each.why

    for _ in range(steps):
        clock.now += chance.choice([0, 0.1, 1, 5, 40 * (chance.random() < 0.02)])
        name = chance.choice(list(known)) if known and chance.random() < 0.9 else "nobody"
        act = chance.randrange(7)
        if act == 0 and len(table) < 50:
            count += 1
            known[f"l{count}"] = table.grant(f"l{count}")
        elif act == 1 and table.renew(name):
            assert name not in ended
            known[name] = max(known[name], clock.now + RENEWAL * LEASE_S)
        elif act == 2 and table.begin_read(name, "r"):
            assert name not in ended
            reading.setdefault(name, set()).add("r")
        elif act == 3:
            reading.get(name, set()).discard("r")
            note(table.end_read(name, "r"))
        elif act == 4:
            note(table.end(name, chance.choice([LeaseEnd.DONE, LeaseEnd.ABORTED])))
        elif act == 5:
            note(table.expire())
            for lease_id in known.keys() - ended.keys():
                assert known[lease_id] > clock.now or reading.get(lease_id) or lease_id in table
        if act == 6:
            assert all(lease_id in table for lease_id in known.keys() - ended.keys())
    clock.now += 1000
    note(table.expire())
    for name, readers in reading.items():
        if readers:
            readers.clear()
            note(table.end_read(name, "r"))
    assert ended.keys() == known.keys() and len(table) == 0
    assert sum(table.counts.values()) == count


@pytest.mark.parametrize("seed", range(8))
def test_every_lease_ends_once_and_never_under_a_reader(seed):
    life(seed, 500)


@pytest.mark.slow
def test_leases_over_a_hundred_thousand_steps():
    life(99, 100_000)
