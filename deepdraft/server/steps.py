"""How each step of an answer went, as the stream of a request that asks for it shows it.

Owns: the object `step` of a choice (docs/api.md).
Knows nothing of: how text is split, sockets, the engine.
"""

from collections.abc import Sequence
from typing import Any

from deepdraft.server.sampling import ModelView
from deepdraft.types import StepTrace


class StepView:
    """The steps of one answer, in their order."""

    def __init__(self, model: ModelView) -> None:
        self._tokenizer = model.tokenizer
        self._decoder = model.tokenizer.incremental()

    def show(
        self, step: StepTrace, token_ids: Sequence[int], parts: Sequence[str]
    ) -> dict[str, Any]:
        """The object of one step. `parts`: where in the answer each token went; those behind a
        stop string went nowhere and are left out."""
        rejected = None
        if step.rejected is not None:
            rejected = {
                "id": step.rejected,
                "text": self._tokenizer.decode((step.rejected,)),
                "confidence": _rounded(step.rejected_confidence),
            }
        return {
            "index": step.index,
            "rows": step.rows,
            "drafted": step.drafted,
            "accepted": step.accepted,
            "ms": round(step.ms, 3),
            "draft_ms": round(step.draft_ms, 3),
            "tokens": [
                {
                    "id": token_id,
                    "text": self._text(token_id, part),
                    "part": part,
                    "origin": step.origins[i],
                    "confidence": _rounded(step.confidences[i]),
                    "probability": _rounded(step.probabilities[i]),
                }
                for i, (token_id, part) in enumerate(zip(token_ids, parts, strict=False))
            ],
            "rejected": rejected,
        }

    def _text(self, token_id: int, part: str) -> str:
        if part == "control":
            self._decoder.flush()
            return self._tokenizer.decode((token_id,))
        return self._decoder.push(token_id)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
