"""CUDA C++ kernels: compiled at first use, kept on disk, launched on the current stream.

Owns: NVRTC and the driver behind ctypes, the cache of compiled kernels, launch attributes. Knows
nothing of: what a kernel computes.

NVRTC comes with every CUDA build of torch. A kernel is kept under $XDG_CACHE_HOME/deepdraft (or
~/.cache/deepdraft) by the hash of its source, its options and the compiler's version, so a changed
source is never taken for an old one.
"""

import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from deepdraft.telemetry import logger

SOURCES = Path(__file__).parent
_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class BuildError(RuntimeError):
    """A kernel could not be compiled or loaded; the message is the compiler's or the driver's."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


# ---- compiler ------------------------------------------------------------------------------


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC: torch's own, else the system's. BuildError where there is none."""
    site = Path(torch.__file__).parents[1] / "nvidia"
    major = (torch.version.cuda or "13").split(".")[0]
    names = [str(p) for p in sorted(site.glob(f"*/lib/libnvrtc.so.{major}*"))]
    for name in (*names, f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            # It opens its second library by name, which the loader finds once it is loaded.
            for part in Path(name).parent.glob("libnvrtc-builtins.so*") if "/" in name else ():
                ctypes.CDLL(str(part))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BuildError("no NVRTC library (it comes with a CUDA build of torch: nvidia-cuda-nvrtc)")


def _checked(lib: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(f"{what}: {lib.nvrtcGetErrorString(status).decode()}")


def _version(lib: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(lib, lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _compile(lib: ctypes.CDLL, source: bytes, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    status = lib.nvrtcCreateProgram(ctypes.byref(program), source, b"stream.cu", 0, None, None)
    _checked(lib, status, "nvrtcCreateProgram")
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = lib.nvrtcCompileProgram(program, len(options), given)
        if status:
            raise BuildError(f"{' '.join(options)}:\n{_text(lib, program)}")
        return _result(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _result(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    out = ctypes.create_string_buffer(size.value)
    _checked(lib, getattr(lib, f"nvrtcGet{what}")(program, out), what)
    return out.raw


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    return _result(lib, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepdraft" / "kernels"


def _whole(file: str) -> bytes:
    """A source with what it includes from this folder put in, so that both make up the key."""
    return re.sub(
        rb'(?m)^#include "([\w.]+)"$',
        lambda found: (SOURCES / found[1].decode()).read_bytes(),
        (SOURCES / file).read_bytes(),
    )


def cubin(file: str, macros: Mapping[str, int], arch: str) -> bytes:
    """Machine code of a source file of this folder, with these macros, for this architecture
    (as sm_90a). BuildError says what the compiler said."""
    lib = _nvrtc()
    source = _whole(file)
    options = [f"-arch={arch}", "-std=c++17", *(f"-D{k}={v}" for k, v in sorted(macros.items()))]
    key = repr((source, options, _version(lib))).encode()
    kept = cache_folder() / f"{hashlib.sha256(key).hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        pass
    code = _compile(lib, source, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as out:
            out.write(code)
        os.replace(out.name, kept)
    except OSError as error:
        logger.info("compiled kernels cannot be kept in %s: %s", kept.parent, error)
    return code


# ---- driver --------------------------------------------------------------------------------


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"no CUDA driver: {error}") from error


def _called(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise BuildError(f"{what}: {(text.value or b'?').decode()} ({status})")


class Kernel:
    """A loaded kernel of one device."""

    def __init__(self, code: bytes, name: str, *, threads: int, shared: int) -> None:
        """The device's context must be current. `shared`: bytes of dynamic shared memory."""
        driver = _driver()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _called(driver.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        status = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _called(status, "cuModuleGetFunction")
        status = driver.cuFuncSetAttribute(function, _SHARED_LIMIT, shared)
        _called(status, f"{shared} bytes of shared memory")
        self._function, self._threads, self._shared = function, threads, shared

    @classmethod
    def load(
        cls, device: torch.device, file: str, name: str, macros: Mapping[str, int], *, threads: int
    ) -> "Kernel":
        """Kernel `name` of a source file, for this device. The macro SHARED_BYTES is its dynamic
        shared memory. Keep what is returned: nothing here remembers it."""
        code = cubin(file, macros, "sm_90a")
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context exists
            return cls(code, name, threads=threads, shared=macros["SHARED_BYTES"])

    @classmethod
    def kept(
        cls, device: torch.device, file: str, name: str, macros: Mapping[str, int], *, threads: int
    ) -> "Kernel":
        """As `load`, once for each set of macros."""
        return _kept(device, file, name, tuple(sorted(macros.items())), threads)

    def launch(
        self, grid: tuple[int, int], params: ctypes.Structure, *, programmatic: bool
    ) -> None:
        """Launch on torch's current stream. `params`: the kernel's only parameter."""
        attribute = _Attribute(_PROGRAMMATIC, b"", (1,))
        config = _Config(
            (grid[0], grid[1], 1), (self._threads, 1, 1), self._shared,
            torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), int(programmatic),
        )  # fmt: skip
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None)
        _called(status, "cuLaunchKernelEx")


@functools.cache
def _kept(
    device: torch.device, file: str, name: str, macros: tuple[tuple[str, int], ...], threads: int
) -> Kernel:
    return Kernel.load(device, file, name, dict(macros), threads=threads)
