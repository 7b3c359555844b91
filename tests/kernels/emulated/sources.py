"""Other sources than stream.cu on a CPU."""

import contextlib
import ctypes
import functools
import subprocess
from unittest import mock

from deepdraft.kernels.native import build
from tests.kernels.emulated import HERE, _folder
from tests.kernels.interpreter import DEVICE


class Emulated:
    """Stands in for build.Kernel: `name`.cu behind emulated/`name`.cpp."""

    def __init__(self, name, macros, threads):
        self.threads, self.run = threads, _built(name, tuple(macros.items()))

    def launch(self, grid, params, *, programmatic):
        assert self.run(ctypes.byref(params), *grid, self.threads) == 0, "it hangs"


@functools.cache
def _built(name, macros):
    target = f"{_folder.name}/{name}_{'_'.join(str(v) for _, v in macros)}.so"
    flags = [f"-D{k}={v}" for k, v in macros]
    source = f'-DSOURCE="{build.SOURCES / name}.cu"'
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", source, *flags]
    subprocess.run([*command, "-o", target, str(HERE / f"{name}.cpp")], check=True)
    return ctypes.CDLL(target).emulate


@contextlib.contextmanager
def switched(module, on, emulated, **fields):
    """A module of kernels.native on or off; on a CPU with its emulated kernel, and those fields of
    the module."""
    with contextlib.ExitStack() as stack:
        changes = {"enabled": lambda device: on}
        if DEVICE != "cuda":
            changes |= {"_kernel": emulated, **fields}
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield
