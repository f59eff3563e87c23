"""Prompts by the names that caches give them, and who is known to hold them."""

from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.features.router.addresses import InstanceAddress, InstanceRole
from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.health import InstanceHealth
from octavo.features.router.journey import Leg
from octavo.features.router.prompt import Prompt
from octavo.kvcache.hashing import HashChain, Sha256Hasher
from octavo.kvcache.published import Mirror, Narrator, Scheme

TOKENS = tuple(range(100, 170))


def engine_hashes(tokens, size, salt=None):
    """As an engine makes them."""
    req = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(), cache_salt=salt)
    chain = HashChain(Sha256Hasher(), size, req)
    chain.extend(tokens)
    return chain.hashes


def mirror(hashes, *, scheme=None, into=None):
    """A copy that has heard of these."""
    copy = Mirror() if into is None else into
    scheme = scheme or Scheme(hash="sha256", hash_block_size=16, block_size=16)
    for note in Narrator("e", scheme).opening(hashes):
        copy.follow(note)
    return copy


def test_the_hashes_are_the_engines_own_and_the_salt_counts():
    assert Prompt(TOKENS).hashes(16) == engine_hashes(TOKENS, 16)
    assert Prompt(TOKENS, "s").hashes(16) == engine_hashes(TOKENS, 16, "s")
    assert Prompt(TOKENS, "s").hashes(16) != Prompt(TOKENS).hashes(16)
    assert len(Prompt(TOKENS).hashes(16)) == 4


def test_only_leading_blocks_count():
    held = engine_hashes(TOKENS, 16)
    assert Prompt(TOKENS).held_by(mirror(held[:2])) == 32
    assert Prompt(TOKENS).held_by(mirror([held[0], held[2], held[3]])) == 16
    assert Prompt(TOKENS).held_by(mirror(held[1:])) == 0
    assert Prompt(TOKENS, "s").held_by(mirror(held)) == 0
    assert Prompt().held_by(mirror(held)) == 0


def test_blocks_of_several_hashes_are_told_by_their_last_one():
    scheme = Scheme(hash="sha256", hash_block_size=8, block_size=32)
    held = engine_hashes(TOKENS, 8)
    assert Prompt(TOKENS).held_by(mirror(held[3::4], scheme=scheme)) == 64
    assert Prompt(TOKENS).held_by(mirror(held[7::4], scheme=scheme)) == 0


def test_hashes_that_nobody_else_can_make_say_nothing():
    scheme = Scheme(hash="xxhash", hash_block_size=16, block_size=16)
    assert Prompt(TOKENS).held_by(mirror(engine_hashes(TOKENS, 16), scheme=scheme)) == 0


def fleet(*roles, load_weight=100):
    members = [
        Member(InstanceAddress(f"m{i}", f"http://m{i}", frozenset(r)), InstanceHealth(2, lambda: 0.0))
        for i, r in enumerate(roles)
    ]
    for member in members:
        member.health.passed()
    return Fleet(members, load_weight=load_weight)


def pick(servers, leg=Leg.WHOLE, without=frozenset(), prompt=None):
    found = servers.pick(leg, without, prompt or Prompt(TOKENS))
    return found and (found[0].name, found[1])


def test_the_server_that_holds_the_prompt_is_chosen_until_its_load_outweighs_it():
    servers = fleet({InstanceRole.PLAIN}, {InstanceRole.PLAIN})
    mirror(engine_hashes(TOKENS, 16), into=servers["m1"].mirror)
    assert servers.informed(Leg.WHOLE)
    assert pick(servers) == ("m1", 64)
    servers["m1"].begin(lambda: None)
    assert pick(servers) == ("m0", 0)


def test_servers_are_asked_by_what_they_are_for_and_others_only_where_there_is_nobody():
    servers = fleet({InstanceRole.PREFILL}, {InstanceRole.DECODE}, {InstanceRole.PLAIN})
    assert servers.disaggregated
    assert [pick(servers, leg)[0] for leg in Leg] == ["m0", "m1", "m2"]
    servers["m2"].health.refused("gone")
    assert pick(servers)[0] == "m1"
    assert pick(servers, without=frozenset({"m1"}))[0] == "m0"
    servers["m0"].health.drains(9.0)
    assert pick(servers, Leg.PREFILL) is None
    assert pick(servers, without=frozenset({"m1"})) is None


def test_turns_are_taken_for_each_purpose_by_itself():
    servers = fleet({InstanceRole.PREFILL}, {InstanceRole.PREFILL}, {InstanceRole.DECODE}, {InstanceRole.DECODE})
    seen = [pick(servers, leg)[0] for _ in range(2) for leg in (Leg.PREFILL, Leg.DECODE)]
    assert seen == ["m0", "m2", "m1", "m3"]


def test_nothing_needs_to_be_known_where_there_is_no_choice_or_nobody_tells():
    servers = fleet({InstanceRole.PLAIN}, {InstanceRole.PLAIN})
    assert not servers.informed(Leg.WHOLE)
    mirror([], into=servers["m0"].mirror)
    assert servers.informed(Leg.WHOLE)
    servers["m1"].health.refused("gone")
    assert not servers.informed(Leg.WHOLE)


def test_what_runs_on_a_server_is_given_up_together_and_ends_once():
    member = fleet({InstanceRole.PLAIN})["m0"]
    done = []
    first, second = (lambda: done.append(1)), (lambda: done.append(2))
    member.begin(first)
    member.begin(second)
    assert member.in_flight == 2
    member.end(first)
    member.end(first)
    assert member.in_flight == 1
    member.give_up()
    assert done == [2]
