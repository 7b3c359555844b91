"""Compiling and keeping CUDA C++ kernels; what happens where they cannot be built."""

import contextlib
import ctypes
import logging

import pytest
import torch

from deepdraft.errors import ConfigError
from deepdraft.kernels.native import (
    attend,
    boundary,
    build,
    fragments,
    plans,
    route,
    select,
    stream,
    trials,
)
from deepdraft.kernels.native.fragments import StreamPlan


class FakeCompiler:
    """NVRTC's calls as far as `cubin` makes them; counts compilations."""

    def __init__(self, error=None):
        self.compiled, self.error = [], error

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 13, 0
        return 0


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    fake = FakeCompiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_nvrtc", lambda: fake)

    def compiled(lib, source, options):
        lib.compiled.append(options)
        return b"code of " + options[0].encode()

    monkeypatch.setattr(build, "_compile", compiled)
    return fake


def test_a_kernel_is_compiled_once_and_kept(compiler):
    first = build.cubin("stream.cu", {"NG": 1}, "sm_90a")
    assert build.cubin("stream.cu", {"NG": 1}, "sm_90a") == first
    assert len(compiler.compiled) == 1
    build.cubin("stream.cu", {"NG": 2}, "sm_90a")
    build.cubin("stream.cu", {"NG": 1}, "sm_100a")
    assert len(compiler.compiled) == 3
    assert len(list(build.cache_folder().glob("*.cubin"))) == 3


def test_a_changed_source_is_compiled_again(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    for text in ("one", 'two\n#include "b.cuh"\nthree\n'):
        (tmp_path / "a.cu").write_text(text)
        (tmp_path / "b.cuh").write_text("of b")
        build.cubin("a.cu", {}, "sm_90a")
    assert build._whole("a.cu") == b"two\nof b\nthree\n"
    (tmp_path / "b.cuh").write_text("of another b")
    build.cubin("a.cu", {}, "sm_90a")
    assert len(compiler.compiled) == 3


def test_a_folder_that_cannot_be_written_only_costs_time(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.cubin("stream.cu", {}, "sm_90a") == build.cubin("stream.cu", {}, "sm_90a")
    assert len(compiler.compiled) == 2


def test_without_a_compiler_the_reason_is_said_and_triton_is_used(monkeypatch, caplog):
    def missing():
        raise build.BuildError("no NVRTC library")

    monkeypatch.setattr(build, "_nvrtc", missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    stream.available.cache_clear()
    monkeypatch.setenv(stream.SETTING, "all")
    device = torch.device("cuda", 0)
    try:
        with caplog.at_level(logging.WARNING, logger="deepdraft"):
            assert stream.dense_plan(device, 64, 64) is None
            assert stream.expert_plans(device, 64, 64) is None
        assert caplog.text.count("Triton's are used: no NVRTC library") == 1
    finally:
        stream.available.cache_clear()


def test_the_setting(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv(stream.SETTING, "all")
    assert stream.dense_plan(cpu, 64, 64) is None
    monkeypatch.setenv(stream.SETTING, "some")
    with pytest.raises(ConfigError, match="DEEPDRAFT_NATIVE='some': one of none"):
        stream.dense_plan(cpu, 64, 64)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_every_variant_fits_into_shared_memory(kind):
    own = stream.FP8_ROWS if kind == "fp8" else stream.UP
    for groups in range(1, 500):
        for plan in fragments.stream_plans(kind, groups):
            assert (stream.shared_bytes(own, plan) + 1024) * plan.blocks <= 228 * 1024


def test_measured_plans_fit_and_cover_the_columns():
    for (kind, _, cols), fields in plans.MEASURED.items():
        if not fields:
            continue
        plan = StreamPlan(*fields)
        own = stream.FP8_ROWS if kind == "dense" else stream.UP
        assert (stream.shared_bytes(own, plan) + 1024) * plan.blocks <= 228 * 1024
        assert plan.groups * plan.across * plan.split == cols // 32
        assert plan.groups % plan.step == 0 and plan.warps in (8, 16)


def test_a_kernel_is_loaded_with_the_memory_that_its_source_was_told(monkeypatch):
    calls = []
    monkeypatch.setattr(build, "cubin", lambda *args: calls.append(args) or b"code")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: calls.append("context"))
    monkeypatch.setattr(
        build.Kernel, "__init__", lambda self, *args, **options: calls.append((args, options))
    )
    device, macros = torch.device("cuda", 1), {"A": 2, "SHARED_BYTES": 640}
    assert isinstance(build.Kernel.load(device, "a.cu", "a", macros, threads=64), build.Kernel)
    assert calls == [
        ("a.cu", macros, "sm_90a"),
        "context",
        ((b"code", "a"), {"threads": 64, "shared": 640}),
    ]
    plan = StreamPlan(2, 2, 8, 2, 1, 2)
    for own in (
        attend.macros(32, 16),
        boundary.macros(4, 6),
        route.macros(96, 6),
        select.macros(8192, 0),
        stream.macros(stream.UP, plan, 0),
    ):
        assert own["SHARED_BYTES"] > 0


def has_nvrtc():
    try:
        build._nvrtc()
    except build.BuildError:
        return False
    return True


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here (it comes with CUDA builds of torch)")
def test_the_source_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kind in (stream.FP8_ROWS, stream.BF16_ROWS, stream.UP, stream.DOWN):
        code = build.cubin(
            "stream.cu", stream.macros(kind, StreamPlan(2, 2, 8, 2, 1, 2), 0), "sm_90a"
        )
        assert code[:4] == b"\x7fELF"
    with pytest.raises(build.BuildError, match="NG"):
        build.cubin("stream.cu", {"KIND": 1}, "sm_90a")


def test_launch_structures_have_the_drivers_sizes():
    assert ctypes.sizeof(build._Attribute) == 72
    assert ctypes.sizeof(build._Config) == 56
    assert ctypes.sizeof(stream._Params) == 128


def test_unknown_trials_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"\['fast'\]: there are lanes"):
        trials.use(["fast"])
    monkeypatch.setattr(trials, "_chosen", None)
    monkeypatch.setenv(trials.SETTING, "lanes")
    assert trials.on("lanes")
