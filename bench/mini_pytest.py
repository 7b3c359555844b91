"""Runs the kernel tests where pytest is not installed (a GPU host with torch and triton alone).

Owns: as much of pytest's surface as tests/kernels uses, and a runner. `install()` before the tests
are imported.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
import traceback
import types
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Mark:
    name: str
    condition: bool = False

    def __call__(self, function):
        function.__dict__.setdefault("marks", []).append(self)
        return function


@dataclass
class Param:
    values: tuple
    marks: tuple = ()


class Marks:
    def parametrize(self, names, values):
        names = [n.strip() for n in names.split(",")]

        def decorate(function):
            sets = function.__dict__.setdefault("sets", [])
            sets.append((names, [v if isinstance(v, Param) else Param((v,)) for v in values]))
            return function

        return decorate

    def skipif(self, condition, *, reason):
        return Mark("skipif", bool(condition))

    def __getattr__(self, name):
        return Mark(name)


@contextmanager
def raises(error, match=""):
    try:
        yield
    except error as e:
        assert re.search(match, str(e)), f"{e} does not match {match!r}"
    else:
        raise AssertionError(f"no {error.__name__}")


def install() -> None:
    """Stand in for pytest in `import pytest`."""
    module = types.ModuleType("pytest")
    module.mark = Marks()
    module.raises = raises
    module.param = lambda *values, marks=(), id=None: Param(values, tuple(marks))
    sys.modules["pytest"] = module


def cases(function):
    """(keyword arguments, marks) of every call that the decorators ask for."""
    own = tuple(function.__dict__.get("marks", ()))
    sets = function.__dict__.get("sets", [])
    for chosen in itertools.product(*(values for _, values in sets)):
        arguments, marks = {}, own
        for (names, _), param in zip(sets, chosen, strict=True):
            values = param.values if len(names) == 1 else param.values[0]
            arguments.update(zip(names, values, strict=True))
            marks += param.marks
        yield arguments, marks


def calls(module):
    """(name, function of no argument) of every test of an imported module that is not skipped."""
    for name, function in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        for arguments, marks in cases(function):
            if not any(m.name == "skipif" and m.condition for m in marks):
                yield f"{name} {arguments}", functools.partial(function, **arguments)


def run(module) -> dict:
    """Run every test function of an imported module; failures are printed."""
    passed, failed, start = 0, [], time.perf_counter()
    for name, call in calls(module):
        try:
            call()
            passed += 1
        except Exception:
            failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    return {"passed": passed, "failed": failed, "seconds": round(time.perf_counter() - start, 1)}
