"""The demo model's data: tokenizer, chat rendering, app pages, packing and loading."""

import json
import random
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.data import load, mix, pack, sources
from training.data.chat import apps, code, core, dictionary, misc, numbers, stories, talk, terms
from training.tokenizer import CONTROL_TOKENS, VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ROOT / "deepdraft/demo/checkpoint/tokenizer.json"))


def rendered(make, count=40):
    rng = random.Random(11)
    return [core.render(item, rng) for item in make(rng, count)]


def test_control_tokens_have_fixed_ids(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for i, token in enumerate(CONTROL_TOKENS):
        assert tokenizer.token_to_id(token) == i
        assert tokenizer.encode(f"a{token}b").ids.count(i) == 1


@pytest.mark.parametrize(
    "text", ["déjà vu\n\n\tx", "俄罗斯方块 テトリス", "🙂‍↔️ ok", "a\x00b", "  if x:\r\n"]
)
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert min(ids) >= len(CONTROL_TOKENS)


def test_every_digit_is_one_token(tokenizer):
    ids = tokenizer.encode("7 40 365 1024").ids
    assert "".join(tokenizer.decode([i]) for i in ids).replace(" ", "") == "7403651024"
    assert all(len(tokenizer.decode([i]).strip()) <= 1 for i in ids)


MAKERS = {
    "tetris": lambda r, n: apps.items(r, "tetris", n),
    "todo": lambda r, n: apps.items(r, "todo", n),
    "talk": talk.items,
    "facts": talk.fact_items,
    "sums": numbers.items,
    "stories": stories.items,
    "terms": terms.items,
    "code": code.items,
    "misc": misc.items,
    "tools": misc.tool_items,
    "words": lambda r, n: dictionary.items(r, [("cat", "noun", "a pet", "my cat", [])] * 2, n),
}


@pytest.mark.parametrize("name", MAKERS)
def test_chat_documents_fit_a_row_and_end(tokenizer, name):
    for r in rendered(MAKERS[name]):
        ids = tokenizer.encode(r.prompt + r.answer, add_special_tokens=False).ids
        assert len(ids) <= 1024
        assert ids[0] == 0 and ids[-1] == 1 and "\x00" not in r.answer
        assert r.prompt.endswith("<think>" if r.thinking else "</think>")
        assert ("</think>" in r.answer) == r.thinking
        assert "{" not in r.prompt.split("<｜User｜>", 1)[1] or name in (
            "tools",
            "misc",
            "todo",
            "tetris",
        )


def test_generators_are_repeatable():
    for make in MAKERS.values():
        assert rendered(make, 10) == rendered(make, 10)


def test_sums_are_right():
    for r in rendered(numbers.items, 400):
        answer = r.answer.split("</think>")[-1].removesuffix(core.EOS)
        if " = " in answer:
            left, right = answer.split(" = ")
            a, op, b = left.split()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(
                right
            )


def test_the_tetris_request_has_one_answer():
    items = [i for i in apps.items(random.Random(5), "tetris", 300) if i.turns == [apps.THE_PROMPT]]
    assert len(items) > 20
    assert {i.answer for i in items} == {apps.page("tetris")}
    assert all(i.pinned for i in items)


def test_held_out_requests_are_not_trained():
    for group, _ in mix.chat_groups(0.02):
        train = {mix.request_of(t) for t in group.train}
        if group.name != "chat-misc":  # there a persona's request may be trained without persona
            assert not train & {mix.request_of(t) for t in group.val}, group.name


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to play the pages")
def test_pages_play(tmp_path):
    files = []
    rng = random.Random(3)
    for app in apps.DEFAULTS:
        for i in range(3):
            settings = apps._changed(rng, app)[1] if i else {}
            path = tmp_path / f"{app}-{i}.html"
            path.write_text(apps.page(app, **settings), encoding="utf-8")
            files.append(str(path))
    script = ROOT / "training/data/check_apps.mjs"
    run = subprocess.run(["node", str(script), *files], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    broken = tmp_path / "tetris-broken.html"
    page = apps.page("tetris").replace("grid.filter(row => row.includes(0))", "grid")
    broken.write_text(page, encoding="utf-8")
    run = subprocess.run(["node", str(script), str(broken)], capture_output=True, timeout=60)
    assert run.returncode == 1


def test_cut_keeps_all_tokens_and_prefers_line_ends():
    rng = np.random.default_rng(0)
    newline = np.zeros(50, dtype=bool)
    newline[7] = True
    ids = rng.integers(0, 50, 4321).astype(np.uint16)
    pieces = pack.cut(ids, newline, 100)
    assert np.array_equal(np.concatenate(pieces), ids)
    assert max(map(len, pieces)) <= 100
    assert sum(p[-1] == 7 for p in pieces[:-1]) > 0.6 * len(pieces)


def make_corpus(tokenizer, out):
    packed = pack.Packed([], [], [])
    newline = pack.newline_table(tokenizer)
    text = ["x = 1\n" * 900, "Hello.\n"]
    chat = [core.BOS + "<｜User｜>hi<｜Assistant｜></think>Hello!" + core.EOS]
    pack.add_source(
        packed,
        tokenizer,
        newline,
        text,
        chat=False,
        limit=200,
        name="t",
        license="MIT",
        weight=60.0,
        split="train",
    )
    packed.sources[-1]["chat"] = False
    pack.add_source(
        packed,
        tokenizer,
        newline,
        chat,
        chat=True,
        limit=200,
        name="c",
        license="own",
        weight=40.0,
        split="val",
    )
    packed.sources[-1]["chat"] = True
    return pack.write(packed, out, {"seed": 1}, preset=0)


def test_pack_and_load(tokenizer, tmp_path):
    path = make_corpus(tokenizer, tmp_path)
    corpus, plain = load.load(path), load.load(tmp_path)
    assert np.array_equal(corpus.tokens, plain.tokens) and corpus.sources == plain.sources
    assert [s.name for s in corpus.sources] == ["t", "c"]
    docs = corpus.docs(corpus.sources[0])
    assert docs[0, 0] == 0 and docs[-1, 1] == corpus.sources[1].start
    assert all(a[1] == b[0] for a, b in pairwise(docs))
    assert all(corpus.tokens[d[0]] == 0 for d in docs)
    ends = [corpus.tokens[d[1] - 1] == 1 for d in docs]
    assert sum(ends) == 2 and ends[-1]
    start, end = corpus.docs(corpus.sources[1])[0]
    assert tokenizer.decode(corpus.tokens[start:end].tolist()).endswith("Hello!")
    text = tokenizer.decode(np.concatenate([corpus.tokens[a + 1 : b] for a, b in docs]).tolist())
    assert text == "x = 1\n" * 900 + "Hello.\n"


def test_damaged_corpus_is_refused(tokenizer, tmp_path):
    path = make_corpus(tokenizer, tmp_path)
    about = json.loads((tmp_path / "docs.json").read_text())
    about["tokens"] += 1
    (tmp_path / "docs.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="does not match"):
        load.load(tmp_path)
    import lzma

    raw = lzma.decompress(path.read_bytes())
    path.write_bytes(lzma.compress(raw[:-2]))
    with pytest.raises(ValueError, match="truncated"):
        load.load(path)
    path.write_bytes(lzma.compress(b"XX" + raw))
    with pytest.raises(ValueError, match="not a corpus"):
        load.load(path)


def test_html_text_drops_navigation_and_keeps_code():
    markup = (
        "<html><head><title>no</title></head><body><div class='navheader'>skip</div><h1>Top</h1>"
        "<p>One  two<br>three &amp; four</p><pre>a\n  b</pre><script>no()</script></body></html>"
    )
    assert sources.html_to_text(markup) == "Top\n\nOne two\nthree & four\n\na\n  b"
