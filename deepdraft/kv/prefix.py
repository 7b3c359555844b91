"""Which stored conversation shares the longest prefix with a new one.

Owns: a tree over blocks of tokens, exact to the token, and the positions of checkpoints in it.
Knows nothing of: bytes of state, tensors, time, who may evict what. Runs without torch.

A node stands for a sequence of whole blocks. Its children are keyed by the next block's tokens,
and the rest of a conversation (less than a block) hangs beside them. Keys are big-endian, so they
sort as the token sequences do, and the key with the longest common prefix is a neighbour of the
place where a block would be inserted. Tokens are compared, not hashes: no collision can match.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

TOKEN_BYTES = 4
MOST_MARKED, MOST_SHARING = 8, 64
"""Thousands of conversations may share a system prompt and the checkpoint at its end; a few of them
are enough to start from."""


def token_array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as uint32; an array of that type is not copied."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.uint32, copy=False)
    # Three times as fast as numpy's own way from a list, which looks at each type.
    return np.frombuffer(array("I", token_ids), dtype=np.uint32)


def token_bytes(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as big-endian uint32."""
    return token_array(token_ids).astype(">u4").tobytes()


class Node:
    """Whole blocks from the root to here. A long conversation makes thousands of them."""

    __slots__ = ("children", "keys", "marks", "owners", "places")

    def __init__(self) -> None:
        self.children: dict[bytes, Node] = {}
        self.owners: dict[bytes, set[int]] = {}
        """Entries by their next block, or by their last tokens."""
        self.keys: list[bytes] = []
        """Sorted keys of `owners`."""
        self.marks: dict[bytes, dict[int, dict[int, None]]] = {}
        """Checkpoints less than a block further: their tokens -> label -> entries, newest last."""
        self.places: list[bytes] = []
        """Sorted keys of `marks`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint whose tokens are a prefix of the request's."""

    position: int
    entry: int
    label: int


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens are shared with every entry of `entries`, and with none are more.

    Entries that are no longer than that are all named, of others `MOST_SHARING` ways to go on.
    """

    length: int
    entries: frozenset[int]
    marks: tuple[Mark, ...]
    """Furthest first; of one place and label the newest `MOST_MARKED` entries."""


@dataclass(frozen=True, slots=True)
class Path:
    """A conversation's way through the tree, made ahead (`PrefixIndex.path`)."""

    tokens: bytes
    keys: list[bytes]
    """Of its whole nodes."""


def common_prefix(a: bytes, b: bytes) -> int:
    """Tokens that two keys share at their start."""
    n = min(len(a), len(b)) // TOKEN_BYTES * TOKEN_BYTES
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    return shared_tokens(*(np.frombuffer(k[:n], dtype=np.uint32) for k in (a, b)))


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two conversations (uint32) share at their start."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))


class PrefixIndex:
    """Conversations by their tokens. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: of a node. Nodes of a long conversation are walked one by one."""
        self.block = block_tokens * TOKEN_BYTES
        self._root = Node()
        self._tokens: dict[int, bytes] = {}
        self._marks: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, entry: int) -> bool:
        return entry in self._tokens

    def _cut(self, tokens: bytes) -> tuple[list[bytes], bytes]:
        whole = len(tokens) // self.block * self.block
        return [tokens[i : i + self.block] for i in range(0, whole, self.block)], tokens[whole:]

    def path(self, token_ids: Sequence[int] | np.ndarray) -> Path:
        """What `match` and `insert` spend most of their time on; any thread may make it."""
        tokens = token_bytes(token_ids)
        keys = self._cut(tokens)[0]
        for key in keys:
            hash(key)  # a key remembers it
        return Path(tokens, keys)

    def start_of(self, path: Path, num_tokens: int) -> Path:
        """The path of a conversation's first tokens."""
        end = num_tokens * TOKEN_BYTES
        return Path(path.tokens[:end], path.keys[: end // self.block])

    def insert(
        self,
        entry: int,
        token_ids: Sequence[int] | np.ndarray | Path,
        checkpoints: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Add an entry: its tokens, and (position, label) of each of its checkpoints."""
        assert entry not in self._tokens, f"{entry=} is in the index"
        path = token_ids if isinstance(token_ids, Path) else self.path(token_ids)
        tokens, most = path.tokens, len(path.tokens) // TOKEN_BYTES
        self._tokens[entry], self._marks[entry] = tokens, dict(checkpoints)
        assert all(0 < p <= most for p in self._marks[entry]), self._marks[entry]
        node = self._root
        for key in [*path.keys, tokens[len(path.keys) * self.block :]]:
            if not key:
                break
            owners = node.owners.get(key)
            if owners is not None:
                owners.add(entry)
                if len(key) == self.block:
                    node = node.children[key]
                continue
            node.owners[key] = {entry}
            insort(node.keys, key)
            if len(key) == self.block:
                child = node.children[key] = Node()
                node = child
        for position, label in self._marks[entry].items():
            node, rest = self._at(path, position)
            if rest not in node.marks:
                node.marks[rest] = {}
                insort(node.places, rest)
            node.marks[rest].setdefault(label, {})[entry] = None

    def _at(self, path: Path, position: int) -> tuple[Node, bytes]:
        end = position * TOKEN_BYTES
        node = self._root
        for key in path.keys[: end // self.block]:
            node = node.children[key]
        return node, path.tokens[end // self.block * self.block : end]

    def remove(self, entry: int) -> None:
        """Forget an entry and the branches that only it had."""
        tokens = self._tokens.pop(entry)
        blocks, tail = self._cut(tokens)
        path = Path(tokens, blocks)
        for position, label in self._marks.pop(entry).items():
            node, rest = self._at(path, position)
            there = node.marks[rest]
            del there[label][entry]
            if not there[label]:
                del there[label]
            if not there:
                del node.marks[rest]
                del node.places[bisect_left(node.places, rest)]
        node = self._root
        for key in [*blocks, tail]:
            if not key:
                break
            owners = node.owners[key]
            owners.remove(entry)
            child = node.children.get(key)
            if not owners:
                del node.owners[key]
                del node.keys[bisect_left(node.keys, key)]
                node.children.pop(key, None)
            if child is None:
                break
            node = child

    def tokens_of(self, entry: int) -> bytes:
        """Tokens of an entry as it was inserted."""
        return self._tokens[entry]

    def _ways(self, token_ids: Sequence[int] | np.ndarray | Path) -> tuple[bytes, Iterable[bytes]]:
        if isinstance(token_ids, Path):
            return token_ids.tokens, token_ids.keys
        tokens, size = token_bytes(token_ids), self.block
        return tokens, (tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size))

    def match(self, token_ids: Sequence[int] | np.ndarray | Path) -> Match | None:
        """The longest prefix of `token_ids` that any entry starts with; None when empty."""
        tokens, keys = self._ways(token_ids)
        node, path, depth = self._root, [self._root], 0
        owners: set[int] = set()
        for key in keys:
            if key not in node.children:
                break
            owners = node.owners[key]
            node = node.children[key]
            path.append(node)
            depth += self.block
        rest = tokens[depth : depth + self.block]
        best, more = 0, set[int]()
        for key in self._neighbours(node, rest):
            shared = common_prefix(key, rest)
            if shared > best:
                best, more = shared, self._sharing(node, rest[: shared * TOKEN_BYTES])
        length = depth // TOKEN_BYTES + best
        if not length:
            return None
        return Match(
            length,
            frozenset(more if best else owners),
            tuple(self._marks_on(path, tokens)),
        )

    @staticmethod
    def _neighbours(node: Node, rest: bytes) -> Iterator[bytes]:
        at = bisect_left(node.keys, rest)
        yield from node.keys[max(0, at - 1) : at + 1]

    @staticmethod
    def _sharing(node: Node, start: bytes) -> set[int]:
        """Entries below a node whose next tokens start with `start`, those that end there first."""
        out: set[int] = set()
        first = bisect_left(node.keys, start)
        for key in node.keys[first : first + MOST_SHARING]:
            if not key.startswith(start):
                break
            out |= node.owners[key]
        return out

    def _marks_on(self, path: list[Node], tokens: bytes) -> Iterator[Mark]:
        for depth in range(len(path) - 1, -1, -1):
            node, at = path[depth], depth * self.block
            # The mark before a key in order is its longest prefix among the marks, or shares less
            # with it than any prefix that is one: go on from what they share.
            key = tokens[at : at + self.block - TOKEN_BYTES]
            while (place := bisect_right(node.places, key) - 1) >= 0:
                mark = node.places[place]
                shared = common_prefix(mark, key) * TOKEN_BYTES
                if shared == len(mark):
                    for label, entries in node.marks[mark].items():
                        for entry in islice(reversed(entries), MOST_MARKED):
                            yield Mark((at + shared) // TOKEN_BYTES, entry, label)
                    if not shared:
                        break
                    shared -= TOKEN_BYTES
                key = key[:shared]

    def check(self) -> None:
        """Raises AssertionError when the tree does not say what the entries say."""
        seen: dict[int, int] = {}
        marks: dict[int, dict[int, int]] = {}

        def walk(node: Node, depth: int) -> None:
            assert node.keys == sorted(node.owners), node.keys
            assert set(node.children) <= set(node.owners)
            assert node.places == sorted(node.marks), node.places
            for rest, labels in node.marks.items():
                assert labels and all(labels.values()), "an empty mark"
                position = (depth + len(rest)) // TOKEN_BYTES
                for label, entries in labels.items():
                    for entry in entries:
                        marks.setdefault(entry, {})[position] = label
            for key, owners in node.owners.items():
                assert owners, "a branch without owners"
                assert (key in node.children) == (len(key) == self.block)
                for entry in owners:
                    assert self._tokens[entry][depth : depth + len(key)] == key
                    seen[entry] = seen.get(entry, 0) + len(key)
                if key in node.children:
                    walk(node.children[key], depth + self.block)

        walk(self._root, 0)
        assert seen == {e: len(t) for e, t in self._tokens.items() if t}
        assert marks == {e: m for e, m in self._marks.items() if m}
