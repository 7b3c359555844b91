"""Engram hash constants against the published primes, row counts and rows (architecture 5.2)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deepdraft.checkpoint.config import load_args
from deepdraft.ops.engram_hash import engram_tables, hash_rows

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
OFFSETS_FROM_16M = [
    [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
    ],
    [
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ],
]


@pytest.fixture(scope="module")
def published():
    return load_args(DATA / "v41-config.json")


def test_published_primes_and_row_counts(published):
    tables = engram_tables(published)
    assert (tables.primes - 16_000_000).tolist() == OFFSETS_FROM_16M
    assert tables.num_embeddings == (384006168, 384016682)
    assert tables.num_embeddings == published.engram_num_embeddings


def test_published_multipliers(published):
    assert engram_tables(published).multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_published_rows(published):
    rows = hash_rows(engram_tables(published), 0, np.array([1000, 2000, 3000, 4000]))
    assert rows.tolist() == [
        *(2490620, 30742399, 43508771, 49736205, 75400613, 94708347, 104378374, 122161697),
        *(141932547, 152141891, 163307126, 176705110, 195924637, 213571307, 224086977, 255415522),
        *(264700880, 276602590, 301365869, 305879126, 324937183, 345597303, 361149035, 375488643),
    ]


def test_small_tables_of_the_recorded_set():
    # ../golden/v41-a engram-hash.json: 97 rows at least, 4 heads, layers 1 and 3.
    tables = engram_tables(load_args(DATA / "v41-a-config.json"))
    assert tables.primes.tolist() == [
        [[97, 101, 103, 107], [109, 113, 127, 131], [137, 139, 149, 151]],
        [[157, 163, 167, 173], [179, 181, 191, 193], [197, 199, 211, 223]],
    ]
    assert tables.offsets[0].flatten().tolist() == [
        *(0, 97, 198, 301, 408, 517, 630, 757, 888, 1025, 1164, 1313)
    ]
    assert tables.multipliers.tolist() == [
        [20691083546088919, 1306792920541207, 9709307491741045, 19976984314515055],
        [7432433543949209, 22048440142918031, 2937100701992263, 18980557919319057],
    ]


def test_rows_stay_inside_their_own_table(published):
    tables = engram_tables(published)
    history = np.random.default_rng(0).integers(0, 99092, size=(50, 7, 4))
    rows = hash_rows(tables, 1, history)
    assert rows.shape == (50, 7, 24)
    first = tables.offsets[1].flatten()
    assert (rows >= first).all()
    assert (rows < first + tables.primes[1].flatten()).all()


def test_an_order_sees_only_its_own_tokens(published):
    tables = engram_tables(published)
    rows = hash_rows(tables, 0, np.array([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 9, 9]]))
    assert (rows[0, :16] == rows[1, :16]).all()
    assert (rows[0, 16:] != rows[1, 16:]).all()
    assert (rows[0, :8] == rows[2, :8]).all()
    assert (rows[0, 8:] != rows[2, 8:]).all()


def test_a_table_without_engram_layers(published):
    args = dataclasses.replace(published, engram_layer_ids=(), engram_num_embeddings=())
    assert engram_tables(args).num_embeddings == ()
