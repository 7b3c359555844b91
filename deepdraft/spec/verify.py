"""Decides which drafts stand, so that the text follows the target's law.

Owns: the rules "token" (Leviathan et al. 2023), "block" (Sun et al. 2024, arXiv 2403.10444,
Algorithm 2, equations 4 and 5) and "coupled" (plain decoding's own picks).
Knows nothing of: models, schedules, how laws and dice are made. Pure: same input, same verdict.

Notation of the comments: p_i, q_i are the laws of target and draft after i drafts, x_i the draft
drawn from q_i, g the number of usable drafts.
"""

from dataclasses import dataclass

from deepdraft.errors import ConfigError
from deepdraft.spec.laws import as_row, excess, is_law
from deepdraft.spec.protocol import RULES, Dice, Number, Proposal, Row, Rule, Target, Verdict, Why


def verify(rule: Rule, proposal: Proposal, target: Target, dice: Dice) -> Verdict:
    """Verifies by name. "coupled" leaves the dice alone; the other two leave `target.pick` alone.

    Raises ConfigError for an unknown rule.
    """
    if rule == "token":
        return verify_token(proposal, target, dice)
    if rule == "block":
        return verify_block(proposal, target, dice)
    if rule == "coupled":
        return verify_coupled(proposal, target)
    raise ConfigError(f"unknown verification rule {rule!r}; use one of {', '.join(RULES)}")


def verify_token(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
    """Each draft on its own: x_i stands with probability min(1, p_i(x_i) / q_i(x_i)).

    The first one that falls is replaced by a token drawn from max(p_i - q_i, 0).
    """
    for i, token_id in enumerate(proposal.token_ids):
        p_V = as_row(target.law(i))
        if not is_law(p_V):
            return _no_law(proposal, i)
        q_V, fault = _draft_law(proposal, i, p_V)
        at = proposal.start + i
        if fault:
            return _verdict(i, dice.pick(at, p_V), "malformed", fault)
        if not dice.accept(at, _ratio(1, p_V, q_V, token_id)):
            return _verdict(i, dice.pick(at, _replacement(1, p_V, q_V, token_id)), "rejected")
    return _bonus(proposal, target, dice)


def verify_block(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
    """All drafts together: the longest prefix that its own dice accepts stands.

    w_0 = 1, w_i = min(1, w_{i-1} p_{i-1}(x_{i-1}) / q_{i-1}(x_{i-1})). A prefix of i < g drafts is
    accepted with probability Z_i / (Z_i + 1 - w_i), where Z_i is the mass of max(w_i p_i - q_i, 0);
    0 / 0 counts as 1. The whole block is accepted with probability w_g. After a prefix shorter than
    the block, the next token is drawn from max(w_i p_i - q_i, 0).

    One-hot drafts go by the token rule: the two accept equally often there, and it needs less.
    """
    if _is_certain(proposal):
        return verify_token(proposal, target, dice)
    chain = _weigh(proposal, target)
    # The longest accepted prefix, looked for from the end: each prefix has its own dice, so those
    # of shorter ones need not be thrown.
    for i in range(len(chain.weights) - 1, -1, -1):
        weight, at = chain.weights[i], proposal.start + i
        if i == chain.end:
            if i and not dice.accept(at - 1, weight):
                continue
            if chain.no_law:
                return _no_law(proposal, i)
            if chain.unmatched is not None:
                return _verdict(i, dice.pick(at, chain.unmatched), "malformed", chain.fault)
            return _bonus(proposal, target, dice)
        p_V, q_V = chain.laws[i]
        excess_V, mass = excess(weight, p_V, q_V)
        if i:
            rest = mass + (1 - weight)
            if not dice.accept(at - 1, mass / rest if rest else 1):
                continue
        # Mass 0 with this prefix chosen takes a rounding error; the target's law is then as near.
        return _verdict(i, dice.pick(at, excess_V if mass else p_V), "rejected")
    raise AssertionError("the empty prefix is always accepted")


def verify_coupled(proposal: Proposal, target: Target) -> Verdict:
    """Drafts stand while they equal what plain decoding picks at their place.

    The text is plain decoding's, token for token. What the drafts were drawn from does not matter.
    """
    for i in range(len(proposal) + 1):
        picked = target.pick(i)
        if picked is None:
            return _no_law(proposal, i)
        if i == len(proposal):
            return _verdict(i, picked, "bonus")
        if picked != proposal.token_ids[i]:
            return _verdict(i, picked, "rejected")
    raise AssertionError("unreachable")


def survival(rule: Rule, proposal: Proposal, target: Target) -> list[Number]:
    """For each i, the probability that at least i + 1 drafts stand, given these drafts.

    Given the first i + 1 drafts, to be exact: the mean over later drafts. Their sum over i is the
    expected number of accepted drafts, free of the dice's noise. For "token" and "block". Ends
    where a law is unusable. Raises ConfigError for another rule.
    """
    if rule not in ("token", "block"):
        raise ConfigError(f"survival is defined for the rules token and block, not for {rule!r}")
    together = rule == "block" and not _is_certain(proposal)
    weight: Number = 1
    chain: list[Number] = []
    for i, token_id in enumerate(proposal.token_ids):
        if not weight:
            break
        p_V = as_row(target.law(i))
        if not is_law(p_V):
            break
        q_V, fault = _draft_law(proposal, i, p_V)
        if fault:
            break
        if together:
            weight = _ratio(weight, p_V, q_V, token_id)
        else:
            weight = weight * _ratio(1, p_V, q_V, token_id)
        chain.append(weight)
    return chain + [0] * (len(proposal) - len(chain))


@dataclass(slots=True)
class _Chain:
    """The weights w_0.. of the prefixes that can stand, and p_i, q_i behind them.

    `end` is the number of usable drafts: where the block ends. Weights stop before it at a draft
    that the target forbids. What ended a block early: a target without a law there, or a draft
    with a fault, whose place the target's law `unmatched` then fills.
    """

    weights: list[Number]
    laws: list[tuple[Row, Row]]
    end: int
    no_law: bool = False
    unmatched: Row | None = None
    fault: str = ""


def _weigh(proposal: Proposal, target: Target) -> _Chain:
    chain = _Chain(weights=[1], laws=[], end=len(proposal))
    for i, token_id in enumerate(proposal.token_ids):
        p_V = as_row(target.law(i))
        if not is_law(p_V):
            # Known from the drafts before this one, so a legal place to end the block.
            chain.end, chain.no_law = i, True
            break
        q_V, fault = _draft_law(proposal, i, p_V)
        if fault:
            chain.end, chain.unmatched, chain.fault = i, p_V, fault
            break
        assert q_V is not None, "a block whose drafts have no laws goes by the token rule"
        chain.laws.append((p_V, q_V))
        weight = _ratio(chain.weights[-1], p_V, q_V, token_id)
        if not weight:
            break  # neither this draft nor a later one can stand
        chain.weights.append(weight)
    return chain


def _ratio(weight: Number, p_V: Row, q_V: Row | None, token_id: int) -> Number:
    """min(1, weight * p(x) / q(x)); the comparison comes first, so the quotient never overflows."""
    wanted = weight * p_V[token_id]
    if q_V is None:
        return wanted
    return 1 if wanted >= q_V[token_id] else wanted / q_V[token_id]


def _replacement(weight: Number, p_V: Row, q_V: Row | None, token_id: int) -> Row:
    if q_V is None:
        left_V = p_V.copy()
        left_V[token_id] = 0
        mass = left_V.sum()
    else:
        left_V, mass = excess(weight, p_V, q_V)
    # Mass 0 after a rejection takes a rounding error; the target's law is then as near.
    return left_V if mass else p_V


def _draft_law(proposal: Proposal, i: int, p_V: Row) -> tuple[Row | None, str]:
    """Draft i's law (None: one-hot), and what is wrong with the draft, if anything."""
    token_id, vocab_size = proposal.token_ids[i], p_V.shape[0]
    if not 0 <= token_id < vocab_size:
        return None, f"draft {i} is token {token_id}, outside the vocabulary [0, {vocab_size})"
    if proposal.laws is None:
        return None, ""
    if i >= len(proposal.laws):
        return None, f"draft {i} has no law"
    q_V = as_row(proposal.laws[i])
    if q_V.shape != p_V.shape:
        return None, f"draft {i} has a law of shape {q_V.shape}, the target's has {p_V.shape}"
    if not is_law(q_V):
        return None, f"draft {i} has a law with NaN, negative entries or a sum other than 1"
    if not q_V[token_id]:
        return None, f"draft {i}, token {token_id}, has probability 0 under its own law"
    return q_V, ""


def _is_certain(proposal: Proposal) -> bool:
    """Every draft had probability 1 under its law."""
    laws, ids = proposal.laws, proposal.token_ids
    if laws is None:
        return True
    if len(laws) < len(ids):
        return False
    rows = (as_row(row) for row in laws)
    return all(
        q_V.ndim == 1 and 0 <= x < q_V.shape[0] and bool(q_V[x] == 1)
        for x, q_V in zip(ids, rows, strict=False)
    )


def _bonus(proposal: Proposal, target: Target, dice: Dice) -> Verdict:
    end = len(proposal)
    p_V = as_row(target.law(end))
    if not is_law(p_V):
        return _no_law(proposal, end)
    return _verdict(end, dice.pick(proposal.start + end, p_V), "bonus")


def _no_law(proposal: Proposal, i: int) -> Verdict:
    detail = f"the target has no law at position {proposal.start + i}"
    return Verdict(num_accepted=i, next_token=None, why="target", detail=detail)


def _verdict(num_accepted: int, next_token: int, why: Why, detail: str = "") -> Verdict:
    return Verdict(num_accepted=num_accepted, next_token=next_token, why=why, detail=detail)
