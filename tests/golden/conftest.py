"""Fixtures of the golden tests: set A, directories of other models, models loaded once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.proof.golden import Golden
from tests.golden.make import BARE, MIXED, SET_A, record


@pytest.fixture(scope="session")
def set_a() -> Golden:
    """Set A, opened; its report is not to be used."""
    return Golden(SET_A)


@pytest.fixture(scope="session")
def load(set_a: Golden) -> Callable[..., DeepseekV41]:
    """Set A's model with the named numerics, loaded once."""
    loaded: dict[tuple[str, torch.dtype], DeepseekV41] = {}

    def model(mode: str = "exact", dtype: torch.dtype = torch.float32) -> DeepseekV41:
        key = (mode, dtype)
        if key not in loaded:
            loaded[key] = set_a.model(make_numerics(mode, dtype))
        return loaded[key]

    return model


@pytest.fixture(scope="session")
def mixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model unlike set A's, all modes."""
    return record(tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="session")
def bare_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model without memory, drafter and ratio 2; exact mode."""
    return record(tmp_path_factory.mktemp("bare"), BARE, modes=("exact",))
