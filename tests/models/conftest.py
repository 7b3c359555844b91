"""Models that several tests share: set A's checkpoint, loaded once for each numerics."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.models.state import SequenceState
from deepdraft.proof.golden import Golden
from deepdraft.proof.golden_run import cache_arrays
from tests.golden.make import SET_A


@pytest.fixture(scope="session")
def golden() -> Golden:
    return Golden(SET_A)


@pytest.fixture(scope="session")
def load(golden: Golden) -> Callable[[str], DeepseekV41]:
    """Set A's model: window 16, index top-16, candidate blocks 6 x 4, drafts of 5."""
    loaded: dict[str, DeepseekV41] = {}

    def model(mode: str = "exact") -> DeepseekV41:
        if mode not in loaded:
            loaded[mode] = golden.model(make_numerics(mode))
        return loaded[mode]

    return model


@pytest.fixture(scope="session")
def model(load: Callable[[str], DeepseekV41]) -> DeepseekV41:
    return load("exact")


@pytest.fixture(scope="session")
def text(golden: Golden) -> list[int]:
    """161 token ids."""
    return [*golden.data.texts.prompt, *golden.data.texts.greedy["exact"]]


def snapshot(state: SequenceState) -> dict[str, object]:
    """All that a sequence is: counters and floors, then every live row of its caches."""
    counters: dict[str, object] = {
        name: getattr(state, name)
        for name in (
            *("num_tokens", "decoder_tokens", "encoder_floor", "decoder_floor"),
            *("drafter_tokens", "drafter_floor", "replay_from", "origin"),
        )
    }
    counters["token_ids"] = list(state.token_ids)
    counters["tail"] = None if state.tail is None else [t.clone() for t in state.tail]
    return counters | dict(cache_arrays(state, True))


def assert_same(a: dict[str, object], b: dict[str, object], *, skip: tuple[str, ...] = ()) -> None:
    """Bitwise equal snapshots."""
    assert a.keys() == b.keys()
    for name in a.keys() - set(skip):
        x, y = a[name], b[name]
        if name == "tail" and x is not None and y is not None:
            pairs = zip(x, y, strict=True)  # type: ignore[call-overload]
            assert all(torch.equal(s, t) for s, t in pairs), name
        elif isinstance(x, Tensor):
            assert isinstance(y, Tensor) and torch.equal(x, y), name
        else:
            assert x == y, name
