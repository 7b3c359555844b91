"""What holds for all tests: the garbage collector leaves alone what collecting them made."""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Half a million objects that stay to the end: looking through them again and again took a
    quarter of the collection, and a twelfth of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
