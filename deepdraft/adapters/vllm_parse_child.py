"""Runs in an environment of vLLM: has its own argument parser read a command line, starts nothing.

Order (`child`): {"words": [...]}. Answer: {"version", "model": {"dtype", "architectures",
"max_model_len"}, "speculative": null or {"method", "drafts", "architectures"}}.
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Parses, and makes the configurations that the engine would start with."""
    order = json.loads((folder / "order.json").read_text())
    import vllm  # pyrefly: ignore[missing-import]
    from vllm.config import ParallelConfig  # pyrefly: ignore[missing-import]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyrefly: ignore[missing-import]
    from vllm.entrypoints.launchers.cli_args import (  # pyrefly: ignore[missing-import]
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import (  # pyrefly: ignore[missing-import]
        FlexibleArgumentParser,
    )

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(order["words"])
    validate_parsed_serve_args(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    model = args.create_model_config()
    spec = args.create_speculative_config(model, ParallelConfig())
    answer = {
        "version": vllm.__version__,
        "model": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "architectures": model.architectures,
            "max_model_len": model.max_model_len,
        },
        "speculative": spec
        and {
            "method": spec.method,
            "drafts": spec.num_speculative_tokens,
            "architectures": spec.draft_model_config.architectures,
        },
    }
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
