"""Interpreter set-up, and one tiny model for all tests of the device step."""

import importlib.util
import warnings

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.kernels import interpreter  # noqa: F401  it sets TRITON_INTERPRET


@pytest.fixture(autouse=True)
def _hardware_arithmetic():
    """As on a GPU, NaN and infinity make no warnings."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield
