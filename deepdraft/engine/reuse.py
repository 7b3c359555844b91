"""What requests take from the KV cache, and what they leave in it.

Owns: the calls of `kv.cache` in the order that a request needs them, and the promise that a fault
of the cache costs a request nothing but the work that it would have saved.
Knows nothing of: HTTP, scheduling, where stored bytes lie. Only the engine's thread calls it,
except `stats`.
"""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepdraft.config import EngineConfig, FleetConfig, memory_of_machine
from deepdraft.engine.identity import files_digest, fingerprint_fields
from deepdraft.engine.request import Request
from deepdraft.engine.runner import Runner
from deepdraft.errors import ConfigError
from deepdraft.kv.cache import KvCache
from deepdraft.kv.codec import layout_of
from deepdraft.kv.directory import RedisDirectory
from deepdraft.kv.fleet import Fleet
from deepdraft.kv.fleet_files import load_fleet
from deepdraft.kv.settings import StoreSettings, TransferSettings
from deepdraft.kv.sidecar import Sidecar
from deepdraft.kv.snapshot import fingerprint
from deepdraft.models.state import StatePool
from deepdraft.telemetry import Counters, logger
from deepdraft.types import CacheUse, FinishReason

if TYPE_CHECKING:
    from deepdraft.engine.load import LoadedModel

AUTO_SHARE, AUTO_MOST = 8, 16 << 30
"""`auto` takes this part of the machine's memory, at most so many bytes."""


def open_reuse(
    model: "LoadedModel", options: EngineConfig, fleet: FleetConfig | None = None
) -> "Reuse | None":
    """The KV cache of a loaded model; None where it is switched off or this model has none.

    Raises ConfigError.
    """
    sharing = fleet is not None and fleet.directory is not None
    runner = model.runner
    missing = _why_not(runner, options)
    if missing is not None:
        if options.kv_spill is not None or sharing:
            raise ConfigError(f"kv_spill and a KV directory need the KV cache, and {missing}")
        logger.info("there is no KV cache: %s", missing)
        return None
    assert isinstance(runner, Runner)
    try:
        layout = layout_of(runner.pool, packed=options.numerics != "exact")
    except ConfigError as error:  # groups of a length that fits no block
        if options.kv_spill is not None or sharing:
            raise
        logger.warning("there is no KV cache: %s", error.message)
        return None
    # Windows of V4.1 can be computed again, though not on a GPU, where only checkpoints start a
    # request; and its drafter has windows of its own.
    v41 = runner.model if isinstance(runner.pool, StatePool) else None
    settings = StoreSettings.of(layout)
    if fleet is not None:
        settings = settings.hurried(fleet.hurry)
    wanted = options.kv_memory
    if wanted == "auto":
        wanted = min(AUTO_MOST, memory_of_machine() // AUTO_SHARE)
    spill = None if options.kv_spill is None else Path(options.kv_spill)
    weights = model.fingerprint
    if spill is not None:
        try:
            spill.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"kv_spill: {spill} cannot be made: {error.strerror}") from error
    if model.path is not None and (spill is not None or sharing):
        weights = files_digest(model.path, spill)
    cache = KvCache(
        runner.pool,
        expected=fingerprint(
            fingerprint_fields(
                runner, numerics=options.numerics, prefill=runner.prefill_mode, weights=weights
            )
        ),
        layout=layout,
        max_bytes=wanted,
        mode=runner.prefill_mode,
        drafter=v41 is not None and runner.block_size > 0,
        rebuilder=v41 if options.device == "cpu" else None,
        settings=settings,
        spill=spill,
        spill_bytes=options.kv_spill_bytes,
        background=True,
        shared=sharing,
    )
    logger.info(
        "the KV cache holds up to %d MiB in memory%s",
        wanted >> 20,
        "" if spill is None else f" and {options.kv_spill_bytes >> 20} MiB on disk",
    )
    if fleet is None or fleet.directory is None:
        return Reuse(runner, cache)
    return Reuse(runner, cache, _join_fleet(cache, fleet), fleet.hand_over_s)


def _why_not(runner: Any, options: EngineConfig) -> str | None:
    """Why this model has no cache; None: it has one."""
    if not options.kv_memory:
        return "it is off (--kv-memory 0)"
    if not isinstance(runner, Runner):
        return "this model's runner has no state that can be stored"
    if options.tp > 1:
        return "several ranks (--tp) have none"
    if options.device == "cuda" and runner.prefill_mode == "encoder":
        return (
            "encoder prefill on a GPU and its decoding are other kernels, so an answer's rows are "
            "not those of a cold run; --prefill full has one"
        )
    return None


def _join_fleet(cache: KvCache, options: FleetConfig) -> Fleet:
    assert options.directory is not None
    files = None if options.files is None else load_fleet(Path(options.files))
    url = options.directory
    space = f"{options.namespace}.{cache.expected.hex()[:16]}"
    RedisDirectory.connect(url, space)  # a wrong address is told now
    host, port = options.address()
    name = options.name or socket.gethostname()
    settings = TransferSettings().hurried(options.hurry)
    sidecar = None
    if options.nixl is not None:
        sidecar = Sidecar(cache.memory.slab, options.nixl, name=name, settings=settings)
    fleet = Fleet(
        cache,
        lambda: RedisDirectory.connect(url, space),
        name=name,
        rule=options.fetch,
        server_tls=None if files is None else files.server_tls,
        client_tls=None if files is None else files.client_tls,
        fleet_key=None if files is None else files.manifest_key,
        settings=settings,
        sidecar=sidecar,
    )
    fleet.start(host, port, options.advertise)
    logger.info("conversations are shared as %s", fleet.owner)
    return fleet


class Reuse:
    """The KV cache as one engine uses it."""

    def __init__(
        self, runner: Any, cache: KvCache, fleet: Fleet | None = None, hand_over_s: float = 0.0
    ) -> None:
        """`runner`: an `engine.runner.Runner`, whose pool the cache was made for. `hand_over_s`:
        what `close` may take to give conversations to the rest of the fleet."""
        self._runner, self.cache, self.fleet = runner, cache, fleet
        self._hand_over_s = hand_over_s
        self.counters = Counters()

    def begin(self, request: Request) -> None:
        """Fills the request's empty sequence with what is stored of its prompt."""
        if not request.source.reuse:
            return
        # With what stands of the answer: a conversation that was stored in its middle holds it.
        prompt, state = request.context(0, request.next_position), request.handle
        try:
            resumed = self.cache.resume(prompt, state)
            points = self.cache.points(prompt)
        except Exception:
            logger.exception("the KV cache failed; %s is computed", request.request_id)
            self.counters.add("errors")
            state.truncate(0)
            return
        start = 0
        if resumed is not None:
            start = request.num_computed = resumed.num_tokens
            request.cached = CacheUse(
                num_tokens=min(resumed.cached_tokens, request.num_prompt),
                source=resumed.source,
                provenance=resumed.provenance,
            )
        request.points = [p for p in points if p > start]
        # A checkpoint a few tokens back can be taken later: no pause for those.
        request.pauses = [p for p in request.points if p < len(prompt) - state.pool.slack]

    def after_prefill(self, request: Request) -> None:
        """Takes the checkpoints that are due after a part of the prompt."""
        state, kept = request.handle, request.checkpoints
        due = [p for p in request.points if p <= state.num_tokens]
        if not due:
            return
        request.points = request.points[len(due) :]
        try:
            kept.extend(c for p in due if (c := self.cache.capture(state, p)) is not None)
        except Exception:
            logger.exception("no checkpoint of %s", request.request_id)
            self.counters.add("errors")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Keeps the conversation of a request that ends, or what may be kept of it: nothing where
        it failed or its prompt was not read to the end."""
        if not request.source.reuse:
            return
        try:
            state = request.handle
            if state is None or reason == "error" or request.tainted or not request.prefilled:
                return
            # Rejected drafts of the last step, and what was chosen behind the answer's end.
            standing = request.next_position - 1 if request.output_ids else request.num_prompt
            if state.num_tokens > standing:
                self._runner.commit(state, standing)
            self.after_prefill(request)
            self._runner.feed_pending(state)
            checkpoints, request.checkpoints = request.checkpoints, []
            session = request.source.session
            if session is None:
                self.cache.store(state, checkpoints)
            else:
                self.cache.store(state, checkpoints, session.stored)
        except Exception:
            logger.exception("the conversation of %s is not stored", request.request_id)
            self.counters.add("errors")
        finally:
            self.cache.discard(request.checkpoints)
            request.checkpoints = []

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A part of a prompt was computed: what a fetch is weighed against."""
        if self.fleet is not None:
            self.fleet.costs.note_prefill(num_tokens, seconds)

    def close(self) -> None:
        """Hands conversations over and leaves the fleet; keeps on disk what is to outlive the
        process."""
        self.cache.flush()
        if self.fleet is not None:
            self.fleet.hand_over(self._hand_over_s)
            self.fleet.close()
        self.cache.close()

    def stats(self) -> dict[str, int]:
        """Counters, each name beginning with kv_."""
        shared = {} if self.fleet is None else self.fleet.stats()
        counts = {**self.cache.stats(), **shared, **self.counters.snapshot()}
        return {f"kv_{name}": value for name, value in counts.items()}
