"""What the cache holds, told to others: a reader has exactly that, or knows that it has not (SCH-27)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.outputs import CacheChanges
from octavo.kvcache.prefix import CacheEvent, changes_of
from octavo.kvcache.published import PORTION, Mirror, Narrator, Note, Scheme, StartOver

SCHEME = Scheme(hash="sha256", hash_block_size=16, block_size=16)
HASHES = [bytes([i]) * 32 for i in range(12)]


def read(mirror, notes):
    """Follow notes as they come over a wire."""
    for note in notes:
        mirror.follow(msgspec.json.decode(msgspec.json.encode(note), type=Note))


def test_a_stream_tells_how_hashes_are_made_then_what_is_there_then_what_changes():
    narrator = Narrator("e1", SCHEME)
    notes = [*narrator.opening(HASHES[:2])]
    notes += narrator.changes(CacheChanges(cleared=True, removed=(HASHES[3],), stored=(HASHES[2],)))
    assert [n.kind for n in notes] == ["description", "stored", "current", "cleared", "removed", "stored"]
    assert [n.seq for n in notes] == list(range(6)) and {n.epoch for n in notes} == {"e1"}
    assert notes[0].scheme == SCHEME and notes[1].hashes == tuple(h.hex() for h in HASHES[:2])
    mirror = Mirror()
    read(mirror, notes)
    assert mirror.hashes() == {HASHES[2]} and mirror.scheme == SCHEME


def test_many_hashes_come_in_portions():
    hashes = [i.to_bytes(32, "big") for i in range(2 * PORTION + 1)]
    notes = [*Narrator("e", SCHEME).opening(hashes)]
    assert [len(n.hashes) for n in notes] == [0, PORTION, PORTION, 1, 0]
    mirror = Mirror()
    read(mirror, notes)
    assert mirror.hashes() == set(hashes) and len(mirror) == len(hashes)


def test_events_of_other_groups_are_left_out_and_nothing_is_no_change():
    events = [
        CacheEvent("stored", 1, HASHES[0]),
        CacheEvent("stored", 0, HASHES[1]),
        CacheEvent("removed", 0, HASHES[2]),
    ]
    assert changes_of(events) == CacheChanges(stored=(HASHES[1],), removed=(HASHES[2],))
    assert changes_of(events[:1]) is None and changes_of([]) is None
    assert changes_of([CacheEvent("cleared")]) == CacheChanges(cleared=True)


@pytest.mark.parametrize(
    "wrong",
    [
        Note(seq=1, epoch="e", kind="stored"),  # no beginning
        Note(seq=0, epoch="e", kind="stored"),
        Note(seq=0, epoch="e", kind="description"),  # that does not say how to hash
    ],
)
def test_a_stream_begins_with_its_description(wrong):
    with pytest.raises(StartOver):
        Mirror().follow(wrong)


def test_a_second_description_starts_over():
    mirror = Mirror()
    narrator = Narrator("e", SCHEME)
    read(mirror, narrator.opening(HASHES))
    with pytest.raises(StartOver):
        read(mirror, [Note(seq=3, epoch="e", kind="description", scheme=SCHEME)])
    assert len(mirror) == 0 and mirror.scheme is None


CHANGES = st.lists(
    st.tuples(st.booleans(), st.sets(st.sampled_from(HASHES)), st.sets(st.sampled_from(HASHES))), max_size=12
)


@given(st.sets(st.sampled_from(HASHES)), CHANGES, st.data())
def test_a_mirror_is_the_cache_or_knows_that_it_is_not(start, changes, data):
    """Random streams of which some notes are lost, doubled or come from another start of the engine."""
    truth = set(start)
    narrator = Narrator("e1", SCHEME)
    notes = [(note, None) for note in narrator.opening(sorted(truth))]
    notes[-1] = (notes[-1][0], frozenset(truth))
    for cleared, removed, stored in changes:
        told = CacheChanges(cleared=cleared, removed=tuple(removed - stored), stored=tuple(stored))
        truth = ((set() if cleared else truth) - (removed - stored)) | stored
        made = [(note, None) for note in narrator.changes(told)]
        if made:
            made[-1] = (made[-1][0], frozenset(truth))
            notes += made
    fault = data.draw(st.sampled_from(["none", "lost", "doubled", "other epoch", "begins anew"]))
    at = data.draw(st.integers(0, len(notes) - 1))
    if fault == "lost":
        sent = notes[:at] + notes[at + 1 :]
    elif fault == "doubled":
        sent = notes[: at + 1] + notes[at:]
    elif fault == "other epoch":
        sent = notes[:at] + [(msgspec.structs.replace(n, epoch="e2"), t) for n, t in notes[at:]]
    elif fault == "begins anew":
        sent = notes[: at + 1] + [(n, None) for n in Narrator("e2", SCHEME).opening([])]
    else:
        sent = notes
    mirror, broke = Mirror(), False
    for note, expected in sent:
        try:
            mirror.follow(note)
        except StartOver:
            broke = True
            break
        if expected is not None:
            assert mirror.hashes() == expected
    last_was_lost = fault == "lost" and at == len(notes) - 1
    whole_other_stream = fault == "other epoch" and at == 0
    assert broke == (fault != "none" and not last_was_lost and not whole_other_stream)
    if broke:
        assert mirror.hashes() == frozenset() and mirror.scheme is None
        again = Narrator("e3", SCHEME)  # starting over works
        read(mirror, again.opening(sorted(truth)))
        assert mirror.hashes() == frozenset(truth)
