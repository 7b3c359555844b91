"""Every fault ends in computing again: damage, full memory, full disk, races, restarts."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from deepdraft.errors import ConfigError, StateError
from deepdraft.kv.cache import KvCache
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.slab import SlotState
from deepdraft.kv.snapshot import VERSION
from deepdraft.kv.spill import SpillDir
from deepdraft.kv.store import Entry, EntryState
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.proof.tiny import tiny_args
from tests.kv.conftest import FINGERPRINT, Served, text
from tests.kv.synthetic import fill, holds, spoil
from tests.kv.test_exact import both

ARGS = tiny_args()
LAYOUT = Layout.of(ARGS, packed=False, block_tokens=8)
SLOT = LAYOUT.block_bytes


class Kept:
    """A cache of synthetic sequences, one block a chunk."""

    def __init__(self, slots: int = 400, spill: Path | None = None, **options: object) -> None:
        self.pool = StatePool(ARGS, num_sequences=4, max_tokens=128, slack=4)
        self.cache = KvCache(
            self.pool,
            expected=FINGERPRINT,
            layout=LAYOUT,
            max_bytes=slots * SLOT,
            settings=StoreSettings(chunk_blocks=1, min_tokens=1),
            spill=spill,
            **{"spill_bytes": 1 << 30, **options},  # type: ignore[arg-type]
        )

    def store(self, tokens: list[int], then: Callable[[int], None] = lambda entry: None) -> bool:
        state = self.pool.open()
        fill(state, tokens)
        done = self.cache.store(state, then=then) is not None
        self.pool.close(state)
        spoil(self.pool)
        return done

    def start(self, tokens: list[int]) -> int:
        """Tokens that a request for `tokens` and one more gets, checked row by row."""
        state = self.pool.open()
        resumed = self.cache.resume([*tokens, 1], state)
        assert resumed is None or holds(state)
        assert state.num_tokens == (resumed.num_tokens if resumed else 0)
        assert state.token_ids == [*tokens, 1][: state.num_tokens]
        self.pool.close(state)
        self.cache.check()
        return resumed.num_tokens if resumed else 0

    @property
    def entries(self) -> list[Entry]:
        return list(self.cache.memory.entries.values())


# ---- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["first block", "last block", "checkpoint"])
def test_a_flipped_bit_in_memory(which: str, model: DeepseekV41) -> None:
    """The answer is computed again, the entry is gone, the next turn is cached again."""
    served, prompt = Served(model), text(1, 60)
    both(served, prompt)
    (entry,) = served.cache.memory.entries.values()
    late = {"first block": entry.chunks[0], "last block": entry.chunks[3]}
    cp = next(c for c in entry.checkpoints if c.info.position == 59)
    chunk = late.get(which, cp.chunks[0])
    served.cache.memory.slab.view(chunk.slot, chunk.length)[chunk.length // 3] ^= 4
    assert both(served, prompt) == "none"
    stats = served.cache.stats()
    assert (stats["corrupt"], stats["restore_failed"], stats["dropped_corrupt"]) == (1, 1, 1)
    assert entry.state is EntryState.CONDEMNED
    assert both(served, prompt) == "59/59"


def test_a_damaged_shared_chunk_is_not_shared_again() -> None:
    kept = Kept()
    base = text(2, 40)
    kept.store(base)
    kept.store([*base, *text(3, 9)])
    assert kept.cache.stats()["chunks_shared"] == 5
    first = kept.entries[0].chunks[0]
    assert all(e.chunks[0] is first for e in kept.entries)
    kept.cache.memory.slab.view(first.slot, first.length)[0] ^= 1
    assert kept.start(base) == 0
    assert not kept.entries
    kept.store(base)
    assert kept.entries[0].chunks[0] is not first and kept.start(base) == 40


def test_a_chunk_found_damaged_is_not_taken_over_by_a_new_entry() -> None:
    kept = Kept()
    kept.store(text(2, 40))
    kept.store([*text(2, 40), *text(3, 9)])
    first = kept.entries[0].chunks[0]
    kept.cache.memory.slab.view(first.slot, first.length)[0] ^= 1
    with pytest.raises(StateError, match="damaged"):
        kept.cache.memory.read(first)
    kept.store([*text(2, 40), *text(4, 9)])
    assert kept.entries[-1].chunks[0] is not first
    assert kept.start([*text(2, 40), *text(4, 9)]) == 49


def test_full_memory_evicts_the_oldest_and_never_what_is_in_use() -> None:
    kept = Kept(slots=100)
    texts = [text(i, 64) for i in range(12)]
    state = kept.pool.open()
    kept.store(texts[0])
    hit = kept.cache.lookup([*texts[0], 1])
    assert hit is not None
    for tokens in texts[1:]:
        assert kept.store(tokens)
    kept.cache.check()
    assert kept.cache.stats()["dropped_evicted"] > 5
    assert kept.start(texts[1]) == 0 and kept.start(texts[-1]) == 64
    resumed = kept.cache.restore(hit, [*texts[0], 1], state)
    assert resumed is not None and holds(state)
    used = 100 - kept.cache.memory.slab.num_free
    assert used <= 95


def test_what_cannot_fit_is_not_stored_and_leaves_nothing() -> None:
    kept = Kept(slots=12)
    assert not kept.store(text(1, 100))
    assert kept.cache.stats()["store_full"] >= 1
    assert kept.cache.memory.slab.num_free == 12
    kept.cache.check()
    kept = Kept(slots=26)
    assert kept.store(text(1, 16))
    hit = kept.cache.lookup(text(1, 17))
    assert hit is not None
    free = kept.cache.memory.slab.num_free
    assert not kept.store(text(2, 120))
    assert kept.cache.memory.slab.num_free == free
    kept.cache.check()
    assert kept.start(text(1, 16)) == 16


def test_without_room_for_a_slot() -> None:
    with pytest.raises(ConfigError, match="more memory"):
        Kept(slots=0)


def test_a_failure_in_the_middle_of_storing_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept()
    kept.store(text(1, 40))
    free, calls = kept.cache.memory.slab.num_free, []
    import deepdraft.kv.codec as codec

    real = codec.capture_blocks

    def failing(layout: Layout, state: SequenceState, first: int, out: object) -> None:
        calls.append(first)
        if len(calls) == 3:
            raise StateError("rows do not lie on the grid")
        real(layout, state, first, out)  # type: ignore[arg-type]

    monkeypatch.setattr(codec, "capture_blocks", failing)
    assert not kept.store([*text(1, 40), *text(2, 60)])
    assert len(calls) == 3 and kept.cache.memory.slab.num_free == free
    kept.cache.check()
    assert kept.cache.stats()["store_refused"] == 1


def test_captured_checkpoints_of_an_aborted_request_are_given_back() -> None:
    kept = Kept()
    state = kept.pool.open()
    fill(state, text(1, 30))
    free = kept.cache.memory.slab.num_free
    captured = kept.cache.capture(state)
    assert captured is not None and kept.cache.memory.slab.num_free < free
    kept.cache.memory.check(held=captured.chunks)
    kept.cache.discard([captured])
    assert kept.cache.memory.slab.num_free == free
    kept.cache.check()


def test_a_checkpoint_of_another_conversation_is_refused() -> None:
    kept = Kept()
    long, short = kept.pool.open(), kept.pool.open()
    fill(long, text(1, 60))
    fill(short, text(2, 30))
    captured = kept.cache.capture(long)
    assert captured is not None
    assert not kept.cache.store(short, [captured])
    assert kept.cache.memory.slab.num_free == kept.cache.memory.slab.num_slots


def test_a_sequence_that_is_too_short_or_not_empty() -> None:
    kept = Kept()
    kept.store(text(1, 100))
    small = StatePool(ARGS, num_sequences=1, max_tokens=64)
    state = small.open()
    assert kept.cache.resume(text(1, 101), state) is None and state.num_tokens == 0
    assert kept.cache.stats()["restore_refused"] == 1
    assert kept.start(text(1, 100)) == 100  # the entry is still good
    fill(state, [1, 2, 3])
    with pytest.raises(StateError, match="empty"):
        kept.cache.resume(text(1, 101), state)
    assert kept.entries[0].pins == 0


def test_a_hit_of_another_request_is_refused() -> None:
    kept = Kept()
    kept.store(text(1, 40))
    state = kept.pool.open()
    hit = kept.cache.lookup([*text(1, 40), 1])
    assert hit is not None
    assert kept.cache.restore(hit, [*text(2, 40), 1], state) is None and state.num_tokens == 0
    assert kept.start(text(1, 40)) == 40  # the entry is still good


def test_storing_from_one_thread_while_others_read() -> None:
    """Readers under pins always see what they looked up, whatever is evicted meanwhile."""
    kept = Kept(slots=80)
    texts = [text(i, 48) for i in range(8)]
    wrong: list[int] = []
    done = threading.Event()
    reads = [0]

    def read() -> None:
        while not done.is_set():
            for tokens in texts:
                hit = kept.cache.lookup([*tokens, 1])
                if hit is None:
                    continue
                assert isinstance(hit.entry, Entry)
                try:
                    for chunk in hit.entry.all_chunks():
                        kept.cache.memory.read(chunk)
                    reads[0] += 1
                except StateError:
                    wrong.append(1)
                finally:
                    kept.cache.release(hit)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        kept.store(texts[turn % 8])
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and reads[0]
    kept.cache.check()
    assert sum(e.pins for e in kept.entries) == 0


# ---- disk ----------------------------------------------------------------------------------


def test_a_restart_finds_what_was_stored(model: DeepseekV41, tmp_path: Path) -> None:
    prompt = text(4, 60)
    first = Served(model, spill=tmp_path, spill_bytes=1 << 30)
    both(first, prompt)
    first.cache.close()
    second = Served(model, spill=tmp_path, spill_bytes=1 << 30)
    _, _, resumed, state = second.answer(prompt, keep=False)
    assert resumed is not None and resumed.source == "disk"
    second.close(state)
    assert both(second, prompt) == "59/59"
    # Another model's files in the same directory are not looked at.
    other = Served(model, spill=tmp_path, spill_bytes=1 << 30, expected=b"x" * 32)
    assert both(other, prompt, keep=False) == "none"


def test_evicted_conversations_come_back_from_disk(tmp_path: Path) -> None:
    kept = Kept(slots=100, spill=tmp_path)
    texts = [text(i, 64) for i in range(12)]
    for tokens in texts:
        assert kept.store(tokens)
    assert kept.cache.stats()["disk_files"] > 5
    for tokens in texts:
        assert kept.start(tokens) == 64


def test_a_server_writes_to_disk_beside_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the low-water mark in the cache's own thread, and nothing is lost on the way."""
    kept = Kept(slots=100, spill=tmp_path, background=True)
    writers, write = set(), SpillDir.write

    def noting(*arguments: object) -> object:
        writers.add(threading.current_thread().name.partition("_")[0])
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SpillDir, "write", noting)
    texts = [text(i, 64) for i in range(12)]
    for tokens in texts:
        assert kept.store(tokens)
        kept.cache.flush()
        kept.cache.check()
        assert kept.cache.memory.slab.num_free >= 5
    assert writers == {"deepdraft-kv"} and kept.cache.stats()["disk_files"] > 0
    for tokens in texts:
        assert kept.start(tokens) == 64
    # An engine that is ahead of the thread gets what it needs, and no more goes for it.
    free = kept.cache.memory.slab.num_free
    kept.cache.memory.unreserve(kept.cache.memory.reserve(free + 1))
    assert writers == {"deepdraft-kv", "MainThread"}
    assert kept.cache.memory.slab.num_free < free + 40
    kept.cache.close()


def test_a_longer_conversation_on_disk_replaces_its_beginning(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 40))
    kept.cache.memory.evict(400)
    kept.store(text(1, 80))
    kept.cache.memory.evict(400)
    assert kept.cache.stats()["disk_files"] == 1
    assert kept.start(text(1, 80)) == 80


def test_the_disk_has_a_limit(tmp_path: Path) -> None:
    kept = Kept(slots=100, spill=tmp_path, spill_bytes=3_000_000)
    for i in range(12):
        kept.store(text(i, 64))
    stats = kept.cache.stats()
    assert 0 < stats["disk_bytes"] <= 3_000_000
    assert stats["disk_bytes"] == sum(p.stat().st_size for p in tmp_path.rglob("*.ddkv"))
    kept.cache.check()
    tiny = Kept(slots=100, spill=tmp_path / "tiny", spill_bytes=1000)
    for i in range(12):
        tiny.store(text(i, 64))
    assert tiny.cache.stats()["disk_too_large"] and not tiny.cache.stats()["disk_files"]
    with pytest.raises(ConfigError, match="size"):
        Kept(spill=tmp_path, spill_bytes=0)


@pytest.mark.parametrize("where", ["head", "tokens", "data", "cut", "empty"])
def test_damage_on_disk(where: str, tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    kept.cache.close()
    (path,) = tmp_path.rglob("*.ddkv")
    data = bytearray(path.read_bytes())
    if where == "cut":
        del data[-100:]
    elif where == "empty":
        data.clear()
    else:
        data[{"head": 9, "tokens": 700, "data": len(data) - 5}[where]] ^= 1
    path.write_bytes(data)
    (path.parent / "x.partial").write_bytes(b"torn")
    again = Kept(spill=tmp_path)
    assert again.start(text(1, 64)) == 0
    again.cache.check()
    assert not list(tmp_path.rglob("*.ddkv")) and not list(tmp_path.rglob("*.partial"))


def test_what_is_no_file_does_not_stop_a_start(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    kept.cache.close()
    (path,) = tmp_path.rglob("*.ddkv")
    (path.parent / "a.ddkv").symlink_to(tmp_path / "nowhere")
    (path.parent / "b.ddkv").mkdir()
    os.mkfifo(path.parent / "c.ddkv")  # opening it would wait for a writer
    again = Kept(spill=tmp_path)
    assert again.start(text(1, 64)) == 64 and again.cache.stats()["disk_damaged"] == 3


def test_files_deleted_behind_our_back(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    kept.cache.memory.evict(400)
    next(tmp_path.rglob("*.ddkv")).unlink()
    assert kept.start(text(1, 64)) == 0


class FullDisk:
    """A file that takes `room` bytes and then says ENOSPC."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


@pytest.mark.parametrize("room", [0, 2000, 60_000])
def test_a_full_disk(room: int, tmp_path: Path) -> None:
    kept = Kept(slots=100, spill=tmp_path)
    assert kept.cache.spill is not None
    kept.cache.spill._opener = lambda path: FullDisk(path.open("wb"), room)  # type: ignore
    for i in range(12):
        assert kept.store(text(i, 64))
    stats = kept.cache.stats()
    assert stats["disk_write_failed"] > 3 and stats["disk_files"] == 0
    assert not list(tmp_path.rglob("*.*"))
    assert kept.start(text(11, 64)) == 64 and kept.start(text(0, 64)) == 0


def test_a_damaged_entry_is_not_spilled(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    chunk = kept.entries[0].chunks[2]
    kept.cache.memory.slab.view(chunk.slot, chunk.length)[5] ^= 1
    kept.cache.memory.evict(400)
    assert not list(tmp_path.rglob("*.*")) and kept.start(text(1, 64)) == 0


def test_files_are_private_and_named_by_their_root(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    kept.cache.close()
    (path,) = tmp_path.rglob("*.ddkv")
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    assert path.stem == path.read_bytes()[16:48].hex()
    assert path.read_bytes()[8] == VERSION


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="choose another"):
        SpillDir(tmp_path / "file", layout=LAYOUT, expected=FINGERPRINT, max_bytes=1)


# ---- fingerprints --------------------------------------------------------------------------


def test_another_fingerprint_never_matches_a_file(tmp_path: Path) -> None:
    kept = Kept(spill=tmp_path)
    kept.store(text(1, 64))
    kept.cache.close()
    (path,) = tmp_path.rglob("*.ddkv")
    wrong = tmp_path / (b"x" * 32).hex()[:32]
    wrong.mkdir()
    path.rename(wrong / path.name)
    other = SpillDir(tmp_path, layout=LAYOUT, expected=b"x" * 32, max_bytes=1 << 30)
    assert not other.files and other.counters["damaged"] == 1


def test_quarantined_memory_comes_back_only_when_told() -> None:
    kept = Kept(slots=20)
    memory = kept.cache.memory
    slots = memory.reserve(5)
    memory.quarantine(slots)
    assert memory.quarantine_full
    assert memory.slab.count(SlotState.QUARANTINED) == 5
    assert not kept.store(text(1, 128))
    memory.check()
    assert memory.release_quarantine(slots[:2]) == 2 and memory.release_quarantine() == 3
    assert not memory.quarantine_full and memory.slab.num_free == 20
