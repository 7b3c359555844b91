"""`deepdraft serve`: flags to settings, settings to a running server.

Owns: the flags of `serve`.
Knows nothing of: HTTP, torch (the server's loading thread imports it).
"""

from typing import Any

import click

from deepdraft.cli.options import (
    ENGINE_FIELDS,
    engine_options,
    fleet_options,
    fleet_settings,
    model_argument,
    model_directory,
)
from deepdraft.config import load_config


@click.command()
@model_argument
@click.option("--host", metavar="NAME", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=int, metavar="N", help="Port to listen on, 0 for any free one [8000].")
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="A further name of the model; may be repeated. The first one is listed first.",
)
@engine_options
@click.option("--max-running", type=int, metavar="N", help="Answers that grow together [16].")
@click.option("--max-queue", type=int, metavar="N", help="Requests that may wait [256].")
@click.option(
    "--drain-seconds", type=float, metavar="S", help="Grace of running requests at the end [25]."
)
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar="DEEPDRAFT_API_KEY",
    metavar="KEY",
    help="A key that requests must bring; may be repeated. Better given as DEEPDRAFT_API_KEY, "
    "where other users of the machine cannot see it.",
)
@click.option("--tls-cert", metavar="FILE", help="PEM certificate chain: speak HTTPS.")
@click.option("--tls-key", metavar="FILE", help="PEM key of the certificate.")
@fleet_options
@click.option("--log-level", type=click.Choice(("debug", "info", "warning", "error")))
@click.option("--log-format", type=click.Choice(("text", "json")), help="Lines or JSON [text].")
@click.option(
    "--log-prompts", is_flag=True, default=None, help="Log each prompt as the model sees it."
)
@click.option(
    "--traces",
    is_flag=True,
    default=None,
    help="Send OpenTelemetry spans where the OTEL_ variables say.",
)
@click.option("--config", "file", metavar="FILE", help="Settings in TOML; flags win over it.")
def serve(model: str | None, file: str | None, **flags: Any) -> None:
    """Serve a model over HTTP, by default the bundled one as `demo`.

    MODEL is a checkpoint directory; its name is the directory's. The port opens at once; /readyz
    answers 200 when the model is loaded and warm.
    """
    config = load_config(
        file,
        engine={name: flags[name] for name in (*ENGINE_FIELDS, "max_running", "max_queue")},
        server={
            "host": flags["host"],
            "port": flags["port"],
            "served_model_names": flags["served_model_name"] or None,
            "drain_s": flags["drain_seconds"],
            **{n: flags[n] for n in ("log_level", "log_format", "tls_cert", "tls_key")},
            "log_prompts": flags["log_prompts"],
            "traces": flags["traces"],
            "api_keys": flags["api_keys"] or None,
            "session_policy": flags["session_policy"],
            "session_header": flags["session_header"],
        },
        fleet=fleet_settings(flags),
    )
    path, name = model_directory(model)
    if config.engine.tp > 1:
        from deepdraft.cli.ranks import serve_on_ranks

        serve_on_ranks(path, name, config, click.get_current_context().find_root().obj)
        return

    from deepdraft.server.run import serve as run
    from deepdraft.server.service import Service

    def load() -> Any:
        from deepdraft.engine.load import load_engine

        return load_engine(path, config.engine, name=name)

    run(Service(load, config))
