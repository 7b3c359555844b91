"""Markov rounds of a draft block: each draft's logits depend on the draft before it. Contract and
torch reference.

A round adds head[v] . embed[previous] to the base logits and takes the best token, or the best with
the noise that the target will meet at the same position. Over a shortlist of tokens only these get
a bias and can be drafted: then the law that a draft is drawn from is that of the shortlist.

Letters: B drafts, V vocabulary, K shortlist, M Markov rank, D hidden.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def rounds(
    base: Tensor,
    shortlist: Tensor,
    embed: Tensor,
    head: Tensor,
    hidden: Tensor,
    confidence: Tensor,
    last: int,
    choose: Callable[[Tensor, Tensor, int], int],
) -> tuple[list[int], Tensor, Tensor]:
    """Drafts of one block, their raw confidences [B], and the shortlist's logits [B, K].

    base [B, V]; shortlist int64 [B, K]; embed, head [V, M]; hidden [B, D]; confidence [D + M];
    last: the token before the first draft. choose(logits [K], tokens [K], b): place of the draft.
    """
    drafts: list[int] = []
    raws, logits = [], []
    previous = last
    for b, tokens in enumerate(shortlist):
        e = embed[previous]
        row = base[b, tokens] + head[tokens] @ e
        raws.append(torch.cat((hidden[b], e)) @ confidence)
        previous = int(tokens[choose(row, tokens, b)])
        drafts.append(previous)
        logits.append(row)
    return drafts, torch.stack(raws), torch.stack(logits)
