"""What strangers, broken peers and broken bytes do to the connection of fronts and engines: they
are cut off, in bounded time and memory, and nobody else notices."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from deepdraft.server import fleet_node
from deepdraft.server import fleet_wire as wire
from tests.fleet.test_front import ANSWER, World, text_of, world_of

NONCE, PROOF = b"n" * wire.NONCE_BYTES, b"p" * 32
TO_ENGINE = (wire.Prove("f", NONCE, PROOF), wire.Alive(), wire.Cancel(("a", "b")), wire.Submit(()))
TO_FRONT = (
    wire.Greet(wire.PROTOCOL, NONCE),
    wire.Accepted(("a",)),
    wire.Refused(("a",), 503, "k", "c", "m", None),
    wire.Beat("ready", wire.Load(), {"a": 1}, {"t": wire.Times((1.0,), (1, 2), 2.0)}),
    wire.Events((wire.Event("a", 0, (1, 2), error="x"),)),
)
DEEP = b"\x95\xa5Prove\xa1f\xc4\x20" + NONCE + b"\xc4\x20" + PROOF + b"\x91" * 4000
"""A proof with a field too many, of arrays in arrays."""


async def read(data: bytes, side: str, most: int = wire.MOST_BYTES) -> Any:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await (wire.read_to_engine if side == "engine" else wire.read_to_front)(reader, most)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize("side", ["engine", "front"])
def test_broken_bytes_are_no_message_and_nothing_worse(side: str) -> None:
    chance = random.Random(3)
    messages = TO_ENGINE if side == "engine" else TO_FRONT

    async def run() -> None:
        refused = 0
        for message in messages:
            assert await read(wire.frame(message), side) == message
        for payload in (b"", DEEP, b"\x91" * 5000, b"\x81" * 5000, b"\x94\xa5Prove\xa1\xff"):
            with pytest.raises(wire.WireError):
                await read(framed(payload), side)
        for _ in range(3000):
            payload = bytearray(wire.frame(chance.choice(messages))[4:])
            for _ in range(chance.randint(1, 4)):
                at = chance.randrange(len(payload))
                if chance.random() < 0.5:
                    payload[at] = chance.randrange(256)
                elif len(payload) > 3:
                    del payload[at : at + chance.randint(1, 3)]
            try:
                await read(framed(bytes(payload or b"\xc0")), side)
            except wire.WireError:
                refused += 1
        assert refused > 1000

    asyncio.run(run())


def test_the_other_sides_messages_and_wrong_sizes_are_refused() -> None:
    async def run() -> None:
        for side, others in (("engine", TO_FRONT), ("front", TO_ENGINE)):
            for message in others:
                with pytest.raises(wire.WireError):
                    await read(wire.frame(message), side)
        for nonce, proof in ((b"", PROOF), (NONCE, b""), (NONCE * 2, PROOF), (NONCE, PROOF * 9)):
            with pytest.raises(wire.WireError):
                await read(wire.frame(wire.Prove("f", nonce, proof)), "engine")
        # The length alone decides: no byte of it is waited for.
        with pytest.raises(wire.WireError, match="a frame of 4097 bytes"):
            await read((4097).to_bytes(4, "big"), "engine", wire.MOST_BYTES_BEFORE)
        with pytest.raises(asyncio.IncompleteReadError):
            await read(framed(b"\x90")[:4], "engine")

    asyncio.run(run())


async def meet(world: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stranger who has been greeted."""
    port = world.engines[0].entry.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert isinstance(await wire.read_to_front(reader), wire.Greet)
    return reader, writer


async def is_cut(reader: asyncio.StreamReader) -> None:
    """Waits for the end of a connection on which nothing more is said."""
    try:
        async with asyncio.timeout(30):
            assert await reader.read() == b""
    except ConnectionResetError:
        pass


def test_strangers_are_cut_off_and_nothing_else_happens(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: faults.append(context)
        )
        async with world_of(tmp_path, 1) as world:
            forged = wire.frame(wire.Prove("f", NONCE, PROOF))
            early = wire.frame(wire.Cancel(("a",)))
            for said in (framed(DEEP), forged, early, b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n"):
                reader, writer = await meet(world)
                writer.write(said)
                await is_cut(reader)
                writer.close()
            node = world.engines[0].node
            assert len(node._lines) == 1 and not node._strangers
            assert text_of(await world.complete()) == ANSWER

    asyncio.run(run())
    assert not faults, faults


def test_a_proof_is_for_one_connection(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            reader, writer = await asyncio.open_connection("127.0.0.1", world.engines[0].entry.port)
            greeting = await wire.read_to_front(reader)
            assert isinstance(greeting, wire.Greet)
            secret = world.registry.secret()
            proof = wire.proof(secret, "front", NONCE, greeting.nonce)
            said = wire.frame(wire.Prove("f", NONCE, proof))
            other_reader, other = await meet(world)
            other.write(said)  # overheard
            await is_cut(other_reader)
            other.close()
            writer.write(said)
            assert isinstance(await wire.read_to_front(reader), wire.Welcome)
            writer.write(said)  # once more: a front greets once
            async with asyncio.timeout(30):
                while True:
                    try:
                        await wire.read_to_front(reader)
                    except (EOFError, OSError):
                        break
            writer.close()

    asyncio.run(run())


def test_strangers_who_wait_keep_no_front_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_node, "GREETING_S", 1000.0)

    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            node = world.engines[0].node
            strangers = [await meet(world) for _ in range(fleet_node._MOST_STRANGERS + 8)]
            assert len(node._strangers) == fleet_node._MOST_STRANGERS
            for line in list(node._lines):
                line.writer.transport.abort()
            await world.until(lambda: not node._lines)
            await world.connected(1)
            assert text_of(await world.complete()) == ANSWER
            for reader, _ in strangers[:8]:
                await is_cut(reader)
            for _, writer in strangers:
                writer.close()
            await world.until(lambda: not node._strangers)

    asyncio.run(run())


def test_one_who_talks_slowly_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_node, "GREETING_S", 2.0)

    async def run() -> None:
        async with world_of(tmp_path, 1) as world:
            reader, writer = await meet(world)
            ended = asyncio.create_task(is_cut(reader))
            writer.write((4000).to_bytes(4, "big"))
            while not ended.done():  # a byte now and then, for as long as it is taken
                writer.write(b"x")
                await asyncio.wait({ended}, timeout=0.05)
            await ended
            writer.close()
            assert not world.engines[0].node._strangers

    asyncio.run(run())
