"""Which chunk goes first (TIR-15)."""

import random
from collections import OrderedDict

import pytest

from octavo.base.errors import ConfigError
from octavo.features.transfer.control.evict import ARC, LRU, make_policy


def anyone(key):
    return True


def keys(text):
    return tuple(letter.encode() for letter in text)


@pytest.mark.parametrize("make", [LRU, ARC])
def test_keys_go_in_the_order_of_their_last_use(make):
    policy = make(10)
    for key in keys("abcd"):
        policy.add(key)
    assert policy.victims(2, anyone) == keys("ab")
    policy.touch(b"a")
    assert policy.victims(4, anyone) == keys("bcda")
    policy.remove(b"b")
    policy.evict(b"c")
    assert policy.victims(9, anyone) == keys("da") and len(policy) == 2
    policy.clear()
    assert policy.victims(9, anyone) == () and not len(policy)


@pytest.mark.parametrize("make", [LRU, ARC])
def test_who_may_not_go_is_passed_over(make):
    policy = make(10)
    for key in keys("abcd"):
        policy.add(key)
    assert policy.victims(2, lambda key: key not in keys("ac")) == keys("bd")
    assert policy.victims(2, lambda key: False) == ()
    assert len(policy) == 4  # nothing was changed


def test_a_scan_does_not_push_out_what_is_used_again_and_again():
    """The reason to have ARC: with LRU the same scan empties the cache of what was worth keeping."""
    hits = {}
    for make in (LRU, ARC):
        policy, resident, count = make(20), set(), 0
        for turn in range(400):
            for key in [
                b"hot%d" % (turn % 10),
                b"hot%d" % (turn * 3 % 10),
                *(b"scan%d.%d" % (turn, i) for i in range(3)),
            ]:
                if key in resident:
                    policy.touch(key)
                    count += key.startswith(b"hot")
                    continue
                if len(resident) == 20:
                    (victim,) = policy.victims(1, anyone)
                    policy.evict(victim)
                    resident.remove(victim)
                policy.add(key)
                resident.add(key)
        hits[make] = count
    assert hits[ARC] > 1.3 * hits[LRU]


def test_arc_s_border_moves_to_what_was_given_up_too_early():
    arc = ARC(4)
    for key in keys("abcd"):
        arc.add(key)
    arc.evict(b"a")
    arc.add(b"a")  # it should have stayed
    assert arc.target == 1 and arc.victims(1, anyone) == keys("b")
    arc.evict(b"a")
    arc.add(b"a")
    assert arc.target == 0


@pytest.mark.parametrize("seed", range(20))
def test_arc_remembers_no_more_than_its_capacity_and_loses_no_key(seed):
    chance = random.Random(seed)
    arc, resident = ARC(8), OrderedDict()
    for _ in range(600):
        key = b"%d" % int(chance.expovariate(0.1))
        if key in resident:
            chance.choice([arc.touch, arc.touch, arc.remove])(key) if chance.random() < 0.9 else arc.evict(key)
            if len(arc) < len(resident):
                del resident[key]
            continue
        if len(resident) == 8:
            victims = arc.victims(chance.randint(1, 3), lambda k: k in resident)
            assert victims and len(set(victims)) == len(victims)
            for victim in victims:
                arc.evict(victim)
                del resident[victim]
        arc.add(key)
        resident[key] = None
        assert len(arc) == len(resident) <= 8 and arc.num_remembered() <= 8 and 0 <= arc.target <= 8
        assert set(arc.victims(99, anyone)) == set(resident)


def test_policies_go_by_name_or_import_path():
    assert isinstance(make_policy("lru", 3), LRU) and isinstance(make_policy("arc", 3), ARC)
    assert isinstance(make_policy("octavo.features.transfer.control.evict:ARC", 3), ARC)
    with pytest.raises(
        ConfigError, match=r"--kv-tier host\?policy=mru: this policy is unknown; use lru, arc or module:Class"
    ):
        make_policy("mru", 3)
    for name in ("no.such.module:LRU", "octavo.features.transfer.control.evict:None_such"):
        with pytest.raises(ConfigError, match="this policy cannot be imported: "):
            make_policy(name, 3)
