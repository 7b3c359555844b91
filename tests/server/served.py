"""A served toy as a process of its own, for tests of signals: python -m tests.server.served DIR."""

import sys
from pathlib import Path

from deepdraft.errors import CheckpointError, DeepdraftError
from deepdraft.server.run import serve

from .toy import Toy


def main() -> int:
    directory, drain_s, length, delay_s, broken = sys.argv[1:6]
    toy = Toy(
        Path(directory),
        server={"port": 0, "drain_s": float(drain_s)},
    )
    toy.runner.delay_s = float(delay_s)
    toy.say("x" * int(length))
    if broken == "broken":

        def load() -> None:
            raise CheckpointError("shard 2 is truncated")

        toy.service._loader = load  # type: ignore[assignment]
    try:
        serve(toy.service)
    except DeepdraftError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
