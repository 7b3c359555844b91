"""Interpreter set-up, and one tiny model for all tests of the device step."""

import dataclasses
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
    """As on a GPU, NaN and infinity make no warnings. Integer overflow is not looked for: that
    takes a third of the time, and tests/kernels looks."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield
    interpreter_builder.options = options
