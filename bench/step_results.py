"""Results of a long script: a JSON file that is whole after every stage."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

BEGIN = time.perf_counter()


class Results:
    """A JSON file that is whole after every stage."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds, self.data = path, seconds, {}

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - BEGIN)

    def save(self) -> None:
        self.data["seconds"] = round(time.perf_counter() - BEGIN, 1)
        text = json.dumps(self.data, indent=1, default=str)
        self.path.write_text(text)

    def stage(self, name: str, run: Callable[[], object], *, needs: float = 5.0) -> object:
        """Run one stage, keep what it returns; None where it failed or there was no time."""
        if self.left() < needs:
            self.data[name] = {"skipped": f"{self.left():.0f} s left, {needs:.0f} needed"}
            print(f"-- {name}: skipped, {self.left():.0f} s left", flush=True)
            self.save()
            return None
        begin = time.perf_counter()
        try:
            value = run()
            self.data[name] = value
        except Exception as error:
            traceback.print_exc()
            value = None
            self.data[name] = {
                "failed": f"{type(error).__name__}: {error}"[:1500],
                "where": traceback.format_exc().splitlines()[-8:],
            }
        took = time.perf_counter() - begin
        at = time.perf_counter() - BEGIN
        shown = json.dumps(self.data[name], default=str)[:700]
        print(f"-- {name} ({took:.1f} s, at {at:.0f}): {shown}", flush=True)
        self.save()
        return value
