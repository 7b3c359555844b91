"""What a front and an engine of a fleet say to each other, as bytes on a connection.

Owns: the messages, their frames and limits, the proof that both know the fleet's secret, requests
and events as messages.
Knows nothing of: sockets' life, routing, engines. Runs without torch; nothing is unpickled.

A frame is a length (4 bytes, big-endian) and a MessagePack array. The engine greets with a nonce,
the front proves itself and sends its own, the engine proves itself and says who it is.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from deepdraft.engine.grammar import GrammarSource
from deepdraft.errors import DeepdraftError, EngineError
from deepdraft.types import (
    CacheUse,
    DecodeStats,
    FinishReason,
    GenerateRequest,
    PromptProgress,
    Rule,
    SamplingParams,
    SpeculationParams,
    StepTrace,
    TokenEvent,
    TokenGrammar,
    TokenLogprob,
)

PROTOCOL = 2
"""Changes with the messages; a front and an engine of different ones do not talk."""
NONCE_BYTES = 32
MOST_BYTES = 256 << 20
"""Of a frame between those that have proved themselves: 16 answers to a million tokens fit."""
MOST_BYTES_BEFORE = 4096
"""Of a frame before that."""
MOST_BYTES_WELCOME = 1 << 20
"""Of the one that brings the proof."""
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """The conversation of a request that is prepared where it will run."""

    key: str
    trace: str

    def stored(self, entry: int, /) -> None:
        """Nothing is stored here."""


class _Message(Struct, array_like=True, tag=True, frozen=True):
    pass


class Kin(NamedTuple):
    """Equal for engines that can take each other's requests before a token is out."""

    tokenizer: str
    family: str
    names: tuple[str, ...]
    sizes: tuple[int, int]
    ends: tuple[int | None, ...]
    rule: Rule


class Identity(Struct, frozen=True, kw_only=True):
    """Who an engine is and what it serves."""

    label: str
    """Of the replica, as clients see it."""
    incarnation: str
    """Of its process: another one each time it starts."""
    version: str
    """Of deepdraft."""
    code: str
    """Digest of its program."""
    fingerprint: str
    """Changes with weights and settings that can change the answers, and with the version."""
    tokenizer: str
    """Digest of its tokenizer."""
    names: tuple[str, ...]
    family: str
    vocab_size: int
    max_tokens: int
    eos_token_id: int
    bos_token_id: int | None
    more_end_ids: tuple[int, ...]
    created: int
    defaults: dict[str, float]
    drafts: int
    rule: Rule

    @property
    def generation(self) -> tuple[str, str]:
        """The same for engines that surely give the same answers."""
        return self.fingerprint, self.code

    @property
    def kin(self) -> Kin:
        """What must be the same for a request to run on either of two engines."""
        ends = (self.eos_token_id, self.bos_token_id, *self.more_end_ids)
        sizes = (self.vocab_size, self.max_tokens)
        return Kin(self.tokenizer, self.family, self.names, sizes, ends, self.rule)


class Load(Struct, frozen=True, kw_only=True):
    """How busy an engine is."""

    running: int = 0
    waiting: int = 0
    to_read: int = 0
    """Tokens of prompts that are still to be read."""
    free: int = 0
    """Sequences that it has memory for beside the running ones."""
    prompt_us: float = 0.0
    """Microseconds that a token of a prompt takes, of late."""
    row_us: float = 0.0
    """Microseconds that a step takes for each of its requests, of late."""


class Times(Struct, frozen=True):
    """A histogram: values up to each bound and above (not cumulative), and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total_s: float


class Ask(Struct, frozen=True, kw_only=True):
    """A `GenerateRequest` on its way; `id` is the attempt's own."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    generated_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    speculation: SpeculationParams
    grammar: GrammarSource | None
    reuse: bool
    session: RemoteSession | None
    tenant: str
    priority: int
    deadline_s: float | None


class Event(Struct, array_like=True, frozen=True):
    """A `TokenEvent` on its way. `at`: tokens of the answer before it. `lost`: not this request
    failed but the engine."""

    id: str
    at: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    at_fault: bool = False
    cached: CacheUse | None = None
    stats: DecodeStats | None = None
    step: StepTrace | None = None
    progress: PromptProgress | None = None
    lost: bool = False


class Greet(_Message, frozen=True):
    """The engine's first words."""

    protocol: int
    nonce: Nonce


class Prove(_Message, frozen=True):
    """The front's answer."""

    front: str
    nonce: Nonce
    proof: Proof


class Welcome(_Message, frozen=True):
    """The engine's answer to that."""

    proof: Proof
    identity: Identity


class Submit(_Message, frozen=True):
    """Requests of one job: all are queued, or none."""

    asks: tuple[Ask, ...]


class Cancel(_Message, frozen=True):
    """Requests that nobody waits for."""

    ids: tuple[str, ...]


class Alive(_Message, frozen=True):
    """A front's sign of life."""


class Accepted(_Message, frozen=True):
    """Requests that are queued."""

    ids: tuple[str, ...]


class Refused(_Message, frozen=True):
    """Requests that are not, and why: an error as clients would see it."""

    ids: tuple[str, ...]
    status: int
    kind: str
    code: str
    message: str
    param: str | None

    @property
    def elsewhere(self) -> bool:
        """Another engine may take them."""
        return self.status in (500, 503)


class Events(_Message, frozen=True):
    """What a step gave, of all requests of this connection."""

    events: tuple[Event, ...]


class Beat(_Message, frozen=True):
    """A sign of life. `state`: ready, draining, or failed. Statistics come with some of them."""

    state: str
    load: Load
    stats: dict[str, int] | None = None
    times: dict[str, Times] | None = None


ToEngine = Prove | Submit | Cancel | Alive
ToFront = Greet | Welcome | Accepted | Refused | Events | Beat
_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


class WireError(EngineError):
    """The other side of a connection says what it must not."""


def frame(message: ToEngine | ToFront) -> bytes:
    """A message with its length."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


async def read_to_engine(reader: asyncio.StreamReader, most: int = MOST_BYTES) -> ToEngine:
    """The next message of a front. Raises WireError, OSError, asyncio.IncompleteReadError."""
    return _decoded(_to_engine, await _payload(reader, most))


async def read_to_front(reader: asyncio.StreamReader, most: int = MOST_BYTES) -> ToFront:
    """The next message of an engine. Raises WireError, OSError, asyncio.IncompleteReadError."""
    return _decoded(_to_front, await _payload(reader, most))


async def _payload(reader: asyncio.StreamReader, most: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > most:
        raise WireError(f"a frame of {size} bytes; at most {most} are read")
    return await reader.readexactly(size)


def _decoded(decoder: Any, payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"a frame that is no message: {error}") from error


def proof(secret: bytes, side: str, own: bytes, others: bytes) -> bytes:
    """Shows that `side` (front or engine) knows the secret: HMAC-SHA256 over both nonces."""
    return hmac.digest(secret, b"|".join((side.encode(), own, others)), hashlib.sha256)


def ask_of(request: GenerateRequest, id: str) -> Ask:
    """A request as a message. Its grammar must have a source, its session be a RemoteSession."""
    grammar: Any = request.grammar
    session = request.session
    assert session is None or isinstance(session, RemoteSession), session
    return Ask(
        id=id,
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        max_new_tokens=request.max_new_tokens,
        generated_ids=request.generated_ids,
        stop_token_ids=tuple(request.stop_token_ids),
        speculation=request.speculation,
        grammar=None if grammar is None else grammar.source,
        reuse=request.reuse,
        session=session,
        tenant=request.tenant,
        priority=request.priority,
        deadline_s=request.deadline_s,
    )


def request_of(ask: Ask, grammar: TokenGrammar | None, session: Any) -> GenerateRequest:
    """A message as a request, with its grammar compiled and its session prepared here."""
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__ if name != "id"}
    fields |= {"grammar": grammar, "session": session}
    fields["stop_token_ids"] = frozenset(ask.stop_token_ids)
    return GenerateRequest(request_id=ask.id, **fields)


_EVENT_FIELDS = tuple(n for n in Event.__struct_fields__ if n not in ("id", "at", "lost"))


def wire_event(event: TokenEvent, at: int, lost: bool = False) -> Event:
    """An event as a message."""
    fields = {n: getattr(event, n) for n in _EVENT_FIELDS}
    return Event(id=event.request_id, at=at, lost=lost, **fields)


def token_event(event: Event, request_id: str) -> TokenEvent:
    """A message as an event of the request that the reader knows."""
    return TokenEvent(request_id=request_id, **{n: getattr(event, n) for n in _EVENT_FIELDS})


def refusal(ids: Iterable[str], error: DeepdraftError) -> Refused:
    """An error as a message."""
    return Refused(
        tuple(ids), error.http_status, error.kind, error.code, error.message, error.param
    )


def error_of(refused: Refused) -> DeepdraftError:
    """A message as an error that answers as it would have there."""
    error = DeepdraftError(refused.message, param=refused.param)
    error.http_status, error.kind, error.code = refused.status, refused.kind, refused.code
    return error
