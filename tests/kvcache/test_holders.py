"""Several that hold blocks, told as one (PDX-2, TIR-4)."""

import random

from octavo.kvcache.hashing import group_key
from octavo.kvcache.holders import Holders
from octavo.kvcache.prefix import CacheEvent, EventLog

A, B = b"a" * 32, b"b" * 32


def key(block_hash, group=0):
    return group_key(block_hash, group)


def made(count=2):
    logs = [EventLog() for _ in range(count)]
    return Holders([log.take for log in logs]), logs


def test_a_hash_is_told_once_and_goes_with_the_last_that_holds_it():
    holders, (device, host) = made()
    device.stored(key(A))
    assert holders.take() == (CacheEvent("stored", 0, A),)
    host.stored(key(A))
    assert holders.take() == ()
    device.removed(key(A))
    assert holders.take() == ()
    host.removed(key(A))
    assert holders.take() == (CacheEvent("removed", 0, A),)


def test_what_moves_from_one_to_the_other_within_a_step_is_not_told():
    holders, (device, host) = made()
    device.stored(key(A))
    holders.take()
    device.removed(key(A))
    host.stored(key(A))
    assert holders.take() == ()


def test_one_that_forgets_everything_takes_only_what_nobody_else_has():
    holders, (device, host) = made()
    for each in (A, B):
        device.stored(key(each))
    host.stored(key(B, 1))
    host.stored(key(B))
    holders.take()
    device.cleared()
    assert holders.take() == (CacheEvent("removed", 0, A),)
    host.cleared()
    assert holders.take() == (CacheEvent("cleared"),)


def test_whatever_happens_what_was_told_is_what_somebody_holds():
    chance = random.Random(5)
    for _ in range(50):
        holders, logs = made(3)
        truth, told = [set(), set(), set()], set()
        for _ in range(60):
            for _ in range(chance.randrange(4)):
                number, block = chance.randrange(3), bytes([chance.randrange(6)]) * 32
                if chance.random() < 0.05:
                    logs[number].cleared()
                    truth[number].clear()
                elif block in truth[number]:
                    logs[number].removed(key(block))
                    truth[number].remove(block)
                else:
                    logs[number].stored(key(block))
                    truth[number].add(block)
            for event in holders.take():
                if event.kind == "cleared":
                    told.clear()
                elif event.kind == "stored":
                    assert event.block_hash not in told
                    told.add(event.block_hash)
                else:
                    told.remove(event.block_hash)
            assert told == set().union(*truth)
