"""The prefix tree against a list of conversations searched one by one."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.kv.prefix import MOST_MARKED, MOST_SHARING, Mark, PrefixIndex

B = 4


def naive(stored: dict[int, list[int]], wanted: list[int]) -> tuple[int, set[int]]:
    shared = {}
    for entry, tokens in stored.items():
        n = 0
        while n < min(len(tokens), len(wanted)) and tokens[n] == wanted[n]:
            n += 1
        shared[entry] = n
    best = max(shared.values(), default=0)
    return best, {e for e, n in shared.items() if n == best and n}


texts = st.lists(st.sampled_from([0, 1, 255, 256, 129279]), max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(texts, max_size=6), st.data())
def test_match_equals_the_plain_search(stored: list[list[int]], data: st.DataObject) -> None:
    index, kept = PrefixIndex(B), {}
    marks: dict[int, dict[int, int]] = {}
    for entry, tokens in enumerate(stored):
        places = data.draw(st.sets(st.integers(1, max(1, len(tokens)))))
        marks[entry] = {p: entry + 100 for p in places if p <= len(tokens)}
        index.insert(entry, tokens, marks[entry].items())
        kept[entry] = tokens
    index.check()
    for entry in data.draw(st.sets(st.sampled_from(sorted(kept) or [0]))) & set(kept):
        index.remove(entry)
        del kept[entry]
    index.check()
    base = data.draw(st.sampled_from([*kept.values(), []]))
    wanted = base[: data.draw(st.integers(0, len(base)))] + data.draw(texts)
    match = index.match(wanted)
    best, entries = naive(kept, wanted)
    if not best:
        assert match is None
        return
    assert match is not None
    assert (match.length, match.entries) == (best, entries)
    expected = {
        Mark(p, e, label)
        for e in kept
        for p, label in marks[e].items()
        if kept[e][:p] == wanted[:p] and p <= len(wanted)
    }
    assert set(match.marks) == expected
    positions = [m.position for m in match.marks]
    assert positions == sorted(positions, reverse=True)


@pytest.mark.parametrize(
    ("wanted", "length"),
    [
        ([9, 2, 3, 4, 5], 0),
        ([1, 2, 9, 4, 5], 2),
        ([1, 2, 3, 4, 9, 6], 4),
        ([1, 2, 3, 4, 5, 6, 9], 6),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 9),
    ],
)
def test_divergence_at_start_inside_a_block_at_its_edge_at_the_last_token(
    wanted: list[int], length: int
) -> None:
    index = PrefixIndex(B)
    index.insert(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    match = index.match(wanted)
    assert (match.length if match else 0) == length


def test_the_entries_of_a_match_share_all_of_it() -> None:
    index = PrefixIndex(B)
    for entry, tokens in enumerate([[1, 2, 3, 4], [1, 2], [1, 3, 3, 4], [1, 2, 7], [2, 2, 3, 4]]):
        index.insert(entry, tokens)
    match = index.match([1, 2, 9, 9])
    assert match is not None and match.length == 2 and match.entries == {0, 1, 3}


def test_a_system_prompt_is_shared_by_all_that_start_with_it() -> None:
    index = PrefixIndex(B)
    system = list(range(10))
    for entry in range(20):
        index.insert(entry, [*system, 50 + entry, 7], [(10, 1)])
    match = index.match([*system, 99, 99])
    assert match is not None and match.length == 10 and len(match.entries) == 20
    assert {m.position for m in match.marks} == {10}
    for entry in range(20):
        index.remove(entry)
    index.check()
    assert index.match(system) is None and len(index) == 0


def test_of_a_crowd_a_few_are_named_and_all_that_end_there() -> None:
    index, system = PrefixIndex(B), list(range(9))  # two nodes and one token
    crowd = range(10 * MOST_SHARING)
    for entry in crowd:
        index.insert(entry, [*system, 50 + entry, 7], [(9, entry % 2)])
    ends = {len(crowd), len(crowd) + 1}
    for entry in ends:
        index.insert(entry, system)
    match = index.match([*system, 9, 9])
    assert match is not None and match.length == 9
    assert ends < match.entries and len(match.entries) <= MOST_SHARING + len(ends)
    newest = {(m.entry, m.label) for m in match.marks}
    assert newest == {(e, e % 2) for e in crowd[-2 * MOST_MARKED :]}
    for entry in crowd[-2 * MOST_MARKED :]:
        index.remove(entry)
    match = index.match([*system, 9, 9])
    assert match is not None and {m.entry for m in match.marks} == set(
        crowd[-4 * MOST_MARKED : -2 * MOST_MARKED]
    )
    index.check()


def test_the_index_starts_without_torch() -> None:
    code = "import sys, deepdraft.kv.prefix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
