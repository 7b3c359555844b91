"""stream.cu on a CPU: compiled by g++ with the counterparts of its machine instructions in cuda.h.

`on_cpu` runs a test that way; on a GPU the test runs the kernel itself.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from deepdraft.kernels.native import build, stream
from tests.kernels.interpreter import DEVICE

HERE = Path(__file__).parent
CAN_RUN = DEVICE == "cuda" or shutil.which("g++") is not None
_BLOCKS = 3
_folder = tempfile.TemporaryDirectory(prefix="emulated-")


class Emulated:
    """Stands in for build.Kernel."""

    def __init__(self, macros, threads):
        self.threads = threads
        name = "_".join(f"{k}{v}" for k, v in macros.items())
        target = Path(_folder.name) / f"{name}.so"
        flags = [f"-D{k}={v}" for k, v in macros.items()]
        source = f'-DSOURCE="{build.SOURCES / "stream.cu"}"'
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", source, *flags]
        subprocess.run([*command, "-o", str(target), str(HERE / "run.cpp")], check=True)
        self.run = ctypes.CDLL(str(target)).emulate

    def launch(self, grid, params, *, programmatic):
        found = self.run(ctypes.byref(params), grid[0], grid[1], self.threads)
        assert found == 0, {1: "it hangs", 2: "a copy came before a read was over"}[found]


@functools.cache
def _loaded(device, made, count):
    return Emulated(dict(made), count)


def on_cpu(test):
    """The decorated test, with the emulated kernel where there is no GPU."""
    if DEVICE == "cuda":
        return test

    @functools.wraps(test)
    def run(*args, **kwargs):
        with (
            mock.patch.object(stream, "_loaded", _loaded),
            mock.patch.object(stream, "_multiprocessors", lambda device: _BLOCKS),
            mock.patch.object(stream, "_checked", lambda *tensors: tensors[0].device),
        ):
            return test(*args, **kwargs)

    return run
