"""The life of the served model: loading, ready, draining, failed.

Owns: the state that /readyz shows, the thread that loads, the engine.
Knows nothing of: HTTP, wire formats. Importing it does not import torch: the loader does that, so
that the port opens first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deepdraft.config import Config
from deepdraft.errors import DeepdraftError, EngineError, Overloaded, UnknownModel
from deepdraft.telemetry import Counters, Histogram, logger

if TYPE_CHECKING:
    from deepdraft.engine.engine import Engine
    from deepdraft.engine.load import LoadedModel
    from deepdraft.kv.fleet import Fleet
    from deepdraft.server.sampling import ModelView

State = Literal["loading", "ready", "draining", "failed"]
Loader = Callable[[], "LoadedModel"]


class Service:
    """One model and its engine. `start` loads in a thread of its own and returns at once."""

    def __init__(self, loader: Loader, config: Config | None = None) -> None:
        self.config = config or Config()
        self.state: State = "loading"
        self.failure: DeepdraftError | None = None
        """Why loading failed."""
        self.num_preparing = 0
        """Requests whose session is looked up or fetched."""
        self.counters = Counters()
        """Answers by status, connections that were cut by reason."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called on the loading thread when loading failed."""
        self.on_drain: Callable[[], None] = lambda: None
        """Called on any thread when new requests are no longer taken."""
        self._loader = loader
        self._engine: Engine | None = None
        self._view: ModelView | None = None
        self._loaded = threading.Event()
        self._thread = threading.Thread(target=self._load, name="deepdraft-load", daemon=True)

    def start(self) -> None:
        """Begins to load. Calling it again does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until loading has ended, well or badly; False when time ran out."""
        return self._loaded.wait(timeout_s)

    def _load(self) -> None:
        begin = time.monotonic()
        try:
            self._bring_up()
        except DeepdraftError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("loading failed")
            self._fail(EngineError(f"loading failed: {type(error).__name__}: {error}"))
        else:
            logger.info("ready after %.1f s", time.monotonic() - begin)
        finally:
            self._loaded.set()

    def _bring_up(self) -> None:
        from deepdraft.engine.engine import Engine
        from deepdraft.engine.fair import TenantLimits
        from deepdraft.engine.reuse import open_reuse
        from deepdraft.server.sampling import ModelView

        # What the first request needs is imported here, so that it need not wait for it.
        from deepdraft.server import chat, completions  # noqa: F401  # isort: skip

        model = self._loader()
        names = (*self.config.server.served_model_names, model.name)
        options = self.config.engine
        engine = Engine(
            model.runner,
            max_queue=options.max_queue,
            max_running=options.max_running,
            prefill_chunk=options.prefill_chunk,
            max_stall_ms=options.max_stall_ms,
            max_parked=options.max_parked,
            preempt_after_s=options.preempt_after_s,
            tenants={
                key.name: TenantLimits(
                    weight=key.weight,
                    max_running=key.max_running or options.tenant_running,
                    max_queue=key.max_queue or options.tenant_queue,
                )
                for key in self.config.server.keys
            },
            tenant_default=TenantLimits(
                max_running=options.tenant_running, max_queue=options.tenant_queue
            ),
            speculation=model.speculation,
            reuse=open_reuse(model, options, self.config.fleet),
        )
        engine.start()
        self._engine = engine
        engine.warm_up()
        self._view = ModelView(
            names=tuple(dict.fromkeys(names)),
            tokenizer=model.tokenizer,
            family=model.family,
            vocab_size=model.runner.vocab_size,
            max_tokens=model.runner.max_tokens,
            eos_token_id=model.eos_token_id,
            bos_token_id=model.bos_token_id,
            more_end_ids=model.more_end_ids,
            fingerprint=model.fingerprint,
            created=int(time.time()),
            defaults=model.sampling_defaults,
        )
        _prepare_grammars(self._view)
        if self.state == "loading":
            self.state = "ready"

    def _fail(self, error: DeepdraftError) -> None:
        self.failure = error
        self.state = "failed"
        self.on_failure()

    def ready(self) -> tuple[Engine, ModelView]:
        """The engine and the model. Raises Overloaded while there is nothing to serve with."""
        if self.state == "loading":
            raise Overloaded("the model is still loading; try again later")
        if self.state == "draining":
            raise Overloaded("the server is shutting down and takes no new requests")
        if self.state == "failed" or self._engine is None or self._view is None:
            message = self.failure.message if self.failure else "nothing is loaded"
            raise Overloaded(f"the model could not be loaded: {message}")
        if self._engine.failure is not None:
            raise EngineError(self._engine.failure)
        return self._engine, self._view

    @property
    def fleet(self) -> Fleet | None:
        """This server's part of a fleet, if it is in one."""
        reuse = None if self._engine is None else self._engine.reuse
        return None if reuse is None else reuse.fleet

    @property
    def engine(self) -> Engine | None:
        """The engine, once there is one."""
        return self._engine

    @property
    def engine_failure(self) -> str | None:
        """Why the engine has stopped, if it has."""
        return None if self._engine is None else self._engine.failure

    def resolve_name(self, name: str | None, view: ModelView) -> str:
        """The name a response shows. Raises UnknownModel, which lists the served names."""
        if name is None:
            return view.names[0]
        if name not in view.names:
            raise UnknownModel(
                f"no model {name!r} is served here; served: {', '.join(view.names)}", param="model"
            )
        return name

    def health(self) -> dict[str, object]:
        """State and counters, for /healthz."""
        body: dict[str, object] = {"state": self.state}
        if self._engine is not None:
            body["engine"] = self._engine.stats()
            if self._engine.failure is not None:
                body["state"] = "failed"
        return body

    def stats(self) -> dict[str, int]:
        """The counters of the server, and the engine's once there is one."""
        own = self.counters.snapshot()
        if self._engine is None:
            return own
        preparing = {} if self.fleet is None else {"kv_preparing": self.num_preparing}
        return {**own, **self._engine.stats(), **preparing}

    def histograms(self) -> dict[str, Histogram]:
        """The engine's times; empty before there is an engine."""
        return {} if self._engine is None else self._engine.endings.histograms

    def metrics_text(self, tasks: int) -> str:
        """Everything of that for Prometheus; `tasks`: of the server's loop."""
        from deepdraft.server.metrics import metrics_text

        return metrics_text({**self.stats(), "tasks": tasks}, self.histograms())

    def begin_drain(self) -> None:
        """Takes no new requests; those at hand go on."""
        began, self.state = self.state != "draining", "draining"
        if self._engine is not None:
            self._engine.begin_drain()
        if began:
            self.on_drain()

    def cancel_all(self) -> None:
        """Ends every request at hand."""
        if self._engine is not None:
            self._engine.cancel_all()

    def close(self) -> None:
        """Ends everything. Waits for the engine's thread, not for a load in progress."""
        self.begin_drain()
        if self._engine is not None:
            self._engine.close()


def _prepare_grammars(view: ModelView) -> None:
    """Builds the vocabulary of grammars, so that the first request with one need not wait."""
    from deepdraft.engine.grammar import compiler_for

    try:
        compiler_for(view.tokenizer, view.vocab_size, view.eos_token_id, view.more_end_ids)
    except Exception:
        # Everything else can be served; a request that needs a grammar says so itself.
        logger.exception("grammars cannot be compiled for this tokenizer")


def bundled_checkpoint() -> Path:
    """Directory of the model that comes with the package."""
    return Path(__file__).resolve().parent.parent / "demo" / "checkpoint"
