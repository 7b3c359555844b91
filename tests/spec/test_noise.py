"""Keyed dice: pinned, reproducible, uniform, apart from each other and from plain decoding."""

import itertools

import numpy as np

from deepdraft.engine.sampler import Sampler
from deepdraft.spec.noise import KeyedDice, Purpose


def test_numbers_are_pinned() -> None:
    # A change of these changes every sampled text: on purpose only.
    got = [
        KeyedDice(0, 0).uniform(0, Purpose.DRAFT),
        KeyedDice(1, 0).uniform(0, Purpose.DRAFT),
        KeyedDice(-1, 7).uniform(9, Purpose.ACCEPT),
        KeyedDice(2**64 + 1, 0).uniform(0, Purpose.DRAFT),
        KeyedDice(12345, 1_000_000).uniform(1_000_003, Purpose.NEXT),
    ]
    assert got == PINNED
    assert got[1] == got[3], "seeds count modulo 2**64"


PINNED = [
    0.4484410893410371,
    0.44517318582192256,
    0.1791361225832997,
    0.44517318582192256,
    0.5061346598115394,
]


def test_numbers_are_uniform_and_uncorrelated() -> None:
    keys = list(itertools.product((0, 1, 2), (2, 3), Purpose))
    u = np.array(
        [
            [KeyedDice(seed, start).uniform(at, use) for start, at, use in keys]
            for seed in range(4000)
        ]
    )
    assert u.min() >= 0.0
    assert u.max() < 1.0
    # Five standard errors.
    assert np.abs(u.mean(0) - 0.5).max() < 5 * 12**-0.5 / 4000**0.5
    correlation = np.corrcoef(u.T) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / 4000**0.5
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    expected = u.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5


def test_no_key_comes_twice() -> None:
    seen = {
        KeyedDice(seed, start).uniform(start + at, use)
        for seed in range(10)
        for start in range(100)
        for at in range(8)
        for use in Purpose
    }
    assert len(seen) == 10 * 100 * 8 * len(Purpose)


def test_dice_do_not_follow_plain_decoding() -> None:
    """The plain sampler's noise for a token, as a uniform number, against ours."""
    sampler = Sampler(8)
    ours, plain = [], []
    for seed in range(3000):
        gumbel = sampler.gumbel(seed, 5)
        plain.append(np.exp(-np.exp(-gumbel.numpy())))
        ours.append([KeyedDice(seed, 5).uniform(5, use) for use in Purpose])
    both = np.corrcoef(np.concatenate([np.array(ours), np.array(plain)], axis=1).T)
    assert np.abs(both[:3, 3:]).max() < 5 / 3000**0.5


def test_accept_is_strict_at_the_ends() -> None:
    for seed in range(200):
        assert KeyedDice(seed, 0).accept(0, 1)
        assert not KeyedDice(seed, 0).accept(0, 0)

    class Zero(KeyedDice):
        def uniform(self, position: int, purpose: Purpose) -> float:
            return 0.0

    assert not Zero(0, 0).accept(0, 0.0)
    assert Zero(0, 0).accept(0, 5e-324)


def test_drafts_and_picks_use_their_own_streams() -> None:
    weights = np.full(1000, 1e-3)
    dice = KeyedDice(3, 4)
    assert dice.draft(5, weights) == int(dice.uniform(5, Purpose.DRAFT) * 1000)
    assert dice.pick(5, weights) == int(dice.uniform(5, Purpose.NEXT) * 1000)
    assert dice.draft(5, weights) != dice.pick(5, weights)
