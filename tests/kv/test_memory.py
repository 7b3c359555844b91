"""Where the slab lies, that CUDA knows it, and that nothing of an earlier owner is left."""

from pathlib import Path

import numpy as np
import pytest
import torch

from deepdraft.kv import numa, placement
from deepdraft.kv.placement import Pinned
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.slab import PAGE, Slab, SlotState
from deepdraft.kv.store import Store
from tests.kv.conftest import text
from tests.kv.test_faults import Kept

# ---- NUMA ----------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """/sys of a machine with two nodes of four processors, a GPU at each, and a node without
    memory."""
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        place = tmp_path / "devices/system/node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "devices/system/node/has_memory").write_text("0-1\n")
    for address, node in (("0000:1b:00.0", 0), ("0000:9c:00.0", 1), ("0000:01:00.0", -1)):
        place = tmp_path / "bus/pci/devices" / address
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("allowed", "found"), [("0-1", [0, 1]), ("1", [1]), ("0-63", [0, 1]), ("", [])]
)
def test_nodes_that_may_be_used(allowed: str, found: list[int], machine: Path) -> None:
    status = machine / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    assert numa.nodes(sys=machine, status=status) == found
    assert numa.nodes(sys=machine / "none", status=status) == []
    assert numa.nodes(sys=machine, status=machine / "none") == []


def test_what_is_near(machine: Path) -> None:
    assert numa.node_of_pci("0000:9C:00.0", sys=machine) == 1
    assert numa.node_of_pci("0000:01:00.0", sys=machine) is None
    assert numa.node_of_pci("0000:77:00.0", sys=machine) is None
    assert numa.node_of_cpus([2, 7], sys=machine) == 1
    assert numa.node_of_cpus([0, 2], sys=machine) is None
    assert numa.nearest_first(1, [0, 1, 2]) == (1, 0, 2)
    assert numa.nearest_first(None, [0, 1]) == (0, 1)
    assert numa.nearest_first(0, [0]) == ()


def test_one_part_of_the_slab_for_each_node() -> None:
    bound: list[tuple[int, int, int]] = []

    def bind(address: int, size: int, node: int) -> bool:
        bound.append((address, size, node))
        return False  # a kernel that refuses changes nothing

    slab = Slab(slot_bytes=100, num_slots=11, nodes=(1, 0, 3), bind=bind)
    begin = slab.array.ctypes.data
    assert [(address - begin, size, node) for address, size, node in bound] == [
        (0, 3 * PAGE, 1),
        (3 * PAGE, 4 * PAGE, 0),
        (7 * PAGE, 4 * PAGE, 3),
    ]
    # The nearest part first, the others when it is full; what comes back is taken first again.
    assert slab.take(2) == [0, 1]
    assert slab.take(3) == [2, 3, 4]
    slab.move([1], SlotState.FREE)
    assert slab.take(2) == [1, 5]
    slab.check()
    assert slab.take(6) is None and slab.num_free == 5
    slab.move([0, 4, 5], SlotState.FREE)
    slab.check()
    assert sorted(slab.take(8) or ()) == [0, 4, 5, 6, 7, 8, 9, 10]


def test_fewer_slots_than_nodes() -> None:
    slab = Slab(slot_bytes=PAGE, num_slots=2, nodes=(0, 1, 2), bind=lambda *where: True)
    assert slab.take(2) == [0, 1]
    slab.move([0, 1], SlotState.FREE)
    slab.check()


def test_binding_on_this_machine() -> None:
    """Whatever it says, the memory is there afterwards."""
    for node in (*numa.nodes(), 63):
        slab = Slab(slot_bytes=PAGE, num_slots=4, as_file=True, nodes=(node,))
        slab.array[:] = 7
        assert slab.array.sum() == 7 * 4 * PAGE
    if numa.nodes():
        slab = Slab(slot_bytes=PAGE, num_slots=4)
        assert numa.bind(slab.array.ctypes.data, 4 * PAGE, numa.nodes()[0]) in (True, False)


def test_nodes_near_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(numa, "node_of_cpus", lambda: 1)
    assert placement.nearest_nodes(torch.device("cpu")) == (1, 0)
    monkeypatch.setattr(numa, "node_of_pci", lambda address: {"0001:9c:00.0": 0}[address])

    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 1, 0x9C, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert placement.nearest_nodes(torch.device("cuda")) == (0, 1)
    monkeypatch.setattr(numa, "nodes", lambda: [0])
    assert placement.nearest_nodes(torch.device("cuda")) == ()


# ---- pinning -------------------------------------------------------------------------------


class Runtime:
    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, list[tuple[str, int, int]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.calls.append(("register", address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 0


def test_memory_is_pinned_until_it_is_closed() -> None:
    slab, runtime = Slab(slot_bytes=PAGE, num_slots=3), Runtime()
    begin = slab.array.ctypes.data
    pinned = Pinned(slab.array, runtime)
    assert pinned.done and runtime.calls == [("register", begin, 3 * PAGE)]
    pinned.close()
    pinned.close()
    assert runtime.calls[1:] == [("unregister", begin, 0)]


def test_memory_that_cuda_refuses_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    slab, runtime = Slab(slot_bytes=PAGE, num_slots=3), Runtime(code=2)
    pinned = Pinned(slab.array, runtime)
    assert not pinned.done and "error 2" in caplog.text
    pinned.close()
    assert len(runtime.calls) == 1


# ---- what an earlier owner left ------------------------------------------------------------


def rest(store: Store) -> np.ndarray:
    """All bytes of used slots that belong to no chunk."""
    parts = [np.zeros(0, np.uint8)]
    for entry in store.entries.values():
        parts += [store.slab.array[c.slot, c.length :] for c in entry.all_chunks()]
    return np.concatenate(parts)


def test_nothing_of_an_earlier_owner_is_behind_a_chunk() -> None:
    store = Store(Slab(slot_bytes=PAGE, num_slots=2), StoreSettings(high_water=1.0, low_water=1.0))
    lengths = [PAGE, 100, 3000, 2999, 1, 4000, 7]
    for number, length in enumerate(lengths):
        (slot,) = store.reserve(1)
        store.room(slot, length)[:] = number + 1
        chunk = store.chunk(slot, length)
        store.hold([chunk])
        entry = store.add([1, 2], exact=True, chunks=[chunk], checkpoints=[])
        store.seal(entry, store.hash(entry))
        assert (store.slab.array[slot, :length] == number + 1).all() and not rest(store).any()
        store.evict(2)


def test_nor_of_a_write_that_was_given_up() -> None:
    store = Store(Slab(slot_bytes=PAGE, num_slots=1), StoreSettings(high_water=1.0, low_water=1.0))
    for end in (store.unreserve, lambda s: (store.quarantine(s), store.release_quarantine())):
        slots = store.reserve(1)
        store.room(slots[0], 2000)[:] = 9
        end(slots)
        (slot,) = store.reserve(1)
        store.room(slot, 10)[:] = 5
        assert store.slab.array[slot].sum() == 50
        store.unreserve([slot])


def test_a_slot_must_be_reserved_to_be_written() -> None:
    store = Store(Slab(slot_bytes=PAGE, num_slots=1), StoreSettings())
    with pytest.raises(AssertionError, match="not reserved"):
        store.room(0, 10)


def test_conversations_of_others_leave_nothing_behind() -> None:
    kept = Kept(slots=30)
    for seed in range(12):
        kept.store(text(seed, 20 + 7 * seed))
        assert not rest(kept.cache.memory).any()
    assert kept.cache.stats()["dropped_evicted"] > 0
