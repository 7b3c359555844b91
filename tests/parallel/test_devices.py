"""What is missing for a run on GPUs is said before anything is loaded. A fake driver library."""

import ctypes

import pytest

from deepdraft.checkpoint.config import load_args
from deepdraft.errors import ConfigError
from deepdraft.parallel import devices
from deepdraft.parallel.devices import Gpu, Machine, Need, check_machine, read_machine, visible
from deepdraft.parallel.plan import sizes_that_divide
from tests.checkpoint.tiny import DATA

GB = 10**9
H200 = Gpu("NVIDIA H200", "GPU-11", 150 * GB, 149 * GB, (9, 0))


class FakeDriver:
    """The functions of NVML that are used."""

    def __init__(self, *, init: int = 0, gpus: tuple[Gpu, ...] = (H200,), cuda: int = 13000):
        self.init, self.gpus, self.cuda, self.ended = init, gpus, cuda, False

    def __call__(self, name: str) -> "FakeDriver":
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        self.ended = True
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, out) -> int:
        out._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, out) -> int:
        out._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, out) -> int:
        out._obj.value = index + 1
        return 0

    def _gpu(self, handle) -> Gpu:
        return self.gpus[handle.value - 1]

    def nvmlDeviceGetMemoryInfo(self, handle, out) -> int:
        out._obj.total, out._obj.free = self._gpu(handle).total_bytes, self._gpu(handle).free_bytes
        return 0

    def nvmlDeviceGetName(self, handle, buffer, _size) -> int:
        buffer.value = self._gpu(handle).name.encode()
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, _size) -> int:
        buffer.value = self._gpu(handle).uuid.encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> int:
        major._obj.value, minor._obj.value = self._gpu(handle).capability
        return 0


def test_what_the_driver_says(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    other = Gpu("NVIDIA H200", "GPU-22", 150 * GB, 10 * GB, (9, 0))
    driver = FakeDriver(gpus=(H200, other), cuda=12040)
    assert read_machine(driver) == Machine((H200, other), (12, 4)) and driver.ended
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read_machine(driver).gpus == (other,)


def test_no_driver_and_drivers_that_do_not_start():
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(ConfigError, match=r"no NVIDIA driver; run with --device cpu"):
        read_machine(missing)
    for code, told in ((9, "not loaded"), (18, "reboot"), (4, "may not use"), (77, "error 77")):
        with pytest.raises(ConfigError, match=told):
            read_machine(FakeDriver(init=code))
    driver = FakeDriver()
    driver.nvmlDeviceGetName = lambda *_: 15
    with pytest.raises(ConfigError, match="nvmlDeviceGetName with error 15"):
        read_machine(driver)
    assert driver.ended


def test_visible_devices_as_cuda_reads_them():
    gpus = [Gpu(f"g{i}", f"GPU-{i}{i}", GB, GB, (9, 0)) for i in range(3)]
    assert visible(gpus, None) == gpus and visible(gpus, "") == []
    assert visible(gpus, "2, 0") == [gpus[2], gpus[0]]
    assert visible(gpus, "GPU-1,0") == [gpus[1], gpus[0]]
    assert visible(gpus, "0,7,1") == [gpus[0]]
    assert visible(gpus, "-1") == [] and visible(gpus, "GPU-") == [] and visible(gpus, "1,1")


def needs(ranks: int) -> Need:
    return Need(gpu_bytes=320 * GB // ranks + 4 * GB, host_bytes=200 * GB)


def refusal(*gpus: Gpu, ranks: int = 2, cuda=(13, 0), built=(13, 0), host: int = 1000 * GB) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(Machine(gpus, cuda), built, ranks, needs, [1, 2, 4, 8], host)
    return str(caught.value)


def test_each_thing_that_may_be_missing(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = (H200,) * 4
    check_machine(Machine(four, (13, 0)), (13, 0), 4, needs, [1, 2, 4, 8], 300 * GB)
    check_machine(Machine(four, (12, 1)), (12, 8), 4, needs, [1, 2, 4, 8], 300 * GB)
    assert "build without CUDA" in refusal(*four, built=None)
    assert refusal() == f"no GPU is visible; {devices.CPU_HINT}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in refusal()
    assert "supports CUDA 12.4, the installed torch was built for 13.0" in refusal(
        *four, cuda=(12, 4)
    )
    assert "--tp 8 needs 8 GPUs, 4 are visible: NVIDIA H200, " in refusal(*four, ranks=8)
    old = Gpu("NVIDIA A100", "GPU-9", 150 * GB, 150 * GB, (8, 0))
    assert "GPU 1 (NVIDIA A100) has compute capability 8.0" in refusal(H200, old)
    told = refusal(*four, ranks=2)
    assert "at --tp 2 each GPU needs 164.0 GB, GPU 0 (NVIDIA H200) has 150.0 GB" in told
    assert told.endswith("--tp 4 would fit GPUs of this size (84.0 GB each)")
    small = Gpu("small", "GPU-3", 16 * GB, 16 * GB, (9, 0))
    assert "at --tp 8, the most, it still takes 44.0 GB" in refusal(small, small)
    busy = Gpu("NVIDIA H200", "GPU-4", 150 * GB, 20 * GB, (9, 0))
    told = refusal(H200, H200, H200, busy, ranks=4)
    assert "GPU 3 (NVIDIA H200) has 20.0 GB of 150.0 GB: something else uses it" in told
    assert "Engram tables take 200.0 GB of host memory, this machine has 64.0 GB" in refusal(
        *four, ranks=4, host=64 * GB
    )


def test_the_installed_torch_is_recognised():
    import torch

    expected = torch.version.cuda
    found = devices.torch_cuda()
    assert found == (None if expected is None else tuple(map(int, expected.split(".")[:2])))


def test_sizes_of_the_published_model():
    assert sizes_that_divide(load_args(DATA / "v41-config.json")) == [1, 2, 4, 8]
