"""The text the tokenizer is trained on: a sample of the real mix without control tokens.

`python -m training.data.tokenizer_sample DIR` trains a new tokenizer. The shipped one is frozen
(its hash is in the corpus description): it was made from the generators as they stood then, so a
new run gives a similar but not an identical file.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from training import tokenizer as tok

from . import fetch, mix, sources

CAP = {"docs": 900_000, "code": 700_000, "prose": 800_000}  # characters taken from each source


def sample(cache: Path) -> list[str]:
    """Texts of about 13 MB documents and 7 MB chat."""
    where = fetch.fetch_all(cache)
    rng = random.Random(0)
    texts: list[str] = []
    for source in sources.plain_sources(where):
        docs = list(source.docs)
        rng.shuffle(docs)
        taken = 0
        for _, text in docs:
            if taken > CAP[source.kind]:
                break
            texts.append(text[:30000])
            taken += len(texts[-1])
    senses = sources.wordnet_senses(where["wordnet-base"])
    rng.shuffle(senses)
    texts += [
        f"What does {word} mean? {word} ({part}): {gloss}. Example: {example}"
        for word, part, gloss, example, _ in senses[:12000]
    ]
    control = re.compile("|".join(map(re.escape, tok.CONTROL_TOKENS)))
    for _, rendered in mix.chat_groups(0.25):
        for r in rendered:
            texts += [part for part in control.split(r.prompt + r.answer) if part]
    return texts


if __name__ == "__main__":
    tok.save(tok.train(sample(Path(".data/fetch"))), Path(sys.argv[1]))
