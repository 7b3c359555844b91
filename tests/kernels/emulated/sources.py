"""Other sources than stream.cu on a CPU."""

import ctypes
import functools
import subprocess

from deepdraft.kernels.native import build
from tests.kernels.emulated import HERE, _folder


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
