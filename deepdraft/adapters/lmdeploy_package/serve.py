"""LMDeploy's server with our module map, which its command line has no flag for.

    python serve.py [PORT]

`serve.json` beside it has the checkpoint and the options of the engine.
"""

import json
import sys
from pathlib import Path


def main(port: int) -> None:
    """Serves on 127.0.0.1 until interrupted."""
    from lmdeploy import PytorchEngineConfig  # pyrefly: ignore[missing-import]
    from lmdeploy.serve.openai.api_server import serve  # pyrefly: ignore[missing-import]

    here = Path(__file__).resolve().parent
    settings = json.loads((here / "serve.json").read_text())
    engine = PytorchEngineConfig(
        custom_module_map=str(here / "module_map.py"), **settings["engine"]
    )
    serve(
        settings["checkpoint"],
        model_name=settings["name"],
        backend="pytorch",
        backend_config=engine,
        server_name="127.0.0.1",
        server_port=port,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 23333)
