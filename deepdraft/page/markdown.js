// Markdown as it grows, drawn into the document, block by block.
//
// Every visible character is a character of the source, so that tokens can be laid over it
// (Track.draw). Nothing is ever parsed as markup by the browser: HTML in an answer is text, or a
// code block that can be run in a sandbox. A finished block is never looked at again. An open one
// takes the lines that have come, and hands them on to the open block inside: a list grows by
// items, a table by rows, code by lines, text by characters.

import { el } from "./dom.js";
import { CodeBlock } from "./code.js";
import { APPEND_FROM, GrowingText } from "./inline.js";

const MAX_DEPTH = 8;
const TELLING = 24; // characters of a line that surely say what it begins
const AT_ONCE = 4000; // characters taken in by one update, so that no frame is long

// No pattern may take longer than in proportion to a line: a line is as long as the model likes.
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]*)/;
const PAGE = /^\s{0,3}<(?:!doctype\s{1,8}html|html[\s>])/i;
const PAGE_END = /<\/html>/i;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t\r]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|\r?$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?\r?$/;

const OUT = 0, IN = 1, BLANK = 2, END = 3; // of a line: whether it belongs to a block, or ends it

// What a line begins besides a paragraph, or null.
function opener(line) {
  if (FENCE.test(line)) return "code";
  if (PAGE.test(line)) return "page";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "item";
  return null;
}

// Whether a line that is still being written already says what it begins.
function telling(line, kind) {
  if (!line.trim() || kind === "table" || /^ {0,3}`{3}/.test(line) || RULE.test(line)) return false;
  return line.length >= TELLING || /^ {0,3}(?:>|#{1,6}[ \t]+\S)/.test(line) || /^\p{L}/u.test(line)
    || /^ {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]+[^\s*\-_]/.test(line);
}

const closes = (line, fence) => {
  const run = line.trim();
  return run.length >= fence.length && /^ {0,3}\S/.test(line) && run === fence[0].repeat(run.length);
};

const isBlank = (text, [a, b]) => !text.slice(a, b).trim();

// A line behind what a pattern matches at its begin.
const behind = (text, [a, b], pattern) => [a + (pattern.exec(text.slice(a, b))?.[0].length ?? 0), b];

function trimmed(text, a, b) {
  while (a < b && /\s/.test(text[a])) a++;
  while (b > a && /\s/.test(text[b - 1])) b--;
  return [a, b];
}

// Where the text of a heading ends: before the marks that may close it and the space before them.
function headingEnd(text, a, b) {
  let end = trimmed(text, a, b)[1];
  let marks = end;
  while (marks > a && text[marks - 1] === "#") marks--;
  if (marks < end && (marks === a || /[ \t]/.test(text[marks - 1]))) end = marks;
  return trimmed(text, a, end)[1];
}

// ---- kinds of blocks: each takes lines of `list` (a BlockList) from its own `first` on -----------

class Block {
  constructor(list, first, { kind, mark }) {
    this.list = list;
    this.kind = kind;
    this.mark = mark; // what of its first line makes it what it is
    this.first = first;
    this.seen = 0; // lines that could change no more when its kind was last looked at
    this.begun = first + 1; // its lines before this are its own by being there
    this.kept = null; // {j, last}: lines before j are looked at for good, those before last its own
    this.last = this.next = first; // behind its text, behind its lines
    this.ended = false;
  }

  // What line j is to the block, whose own lines end at `last`.
  takes() { return OUT; }

  // Whether lines before j stay what they are to the block, whatever comes.
  keeps(j) { return j <= this.list.whole; }

  // Looks at the lines that have come.
  scan(final) {
    let { j, last } = (this.kept ??= { j: this.begun, last: this.begun });
    this.ended = false;
    while (j < this.list.lines.length && !this.ended) {
      const how = this.takes(j, last, final);
      if (how === OUT) break;
      this.ended = how === END;
      j++;
      if (how === IN) last = j;
      if (this.keeps(j)) this.kept = { j, last };
    }
    this.last = last;
    this.next = this.ended ? j : last;
  }

  // Whether nothing that may still come can change the block any more.
  isClosed() {
    const { list, kind } = this;
    for (let j = this.next; j < list.lines.length; j++) {
      const line = list.line(j), whole = j < list.whole;
      if (!line.trim()) {
        if (whole && kind !== "item") return true;
        continue;
      }
      // A table shows by its second line.
      if (line.includes("|") && j + 1 >= list.whole) return false;
      return whole || telling(line, kind);
    }
    return false;
  }

  draw() {}

  place(node) {
    this.node = node;
    this.list.node.append(node);
  }

  drop() {
    this.node.remove();
  }
}

class Paragraph extends Block {
  constructor(...args) {
    super(...args);
    this.place(el("p"));
    this.text = new GrowingText(this.list.track, this.node);
    this.begun = this.first;
  }

  takes(j) {
    const line = this.list.line(j);
    if (j === this.first) return IN;
    if (!line.trim() || this.list.isTable(j)) return OUT;
    const other = opener(line);
    // A line such as "2024. It was" goes on with the paragraph.
    return other && !(other === "item" && /^ *\d/.test(line) && !/^ *1[.)]/.test(line)) ? OUT : IN;
  }

  // A line with a bar may turn out to be the head of a table.
  keeps(j) {
    return j < this.list.whole || (j === this.list.whole && !this.list.line(j - 1).includes("|"));
  }

  draw(open) {
    const { lines } = this.list;
    const { j } = this.kept;
    let sure = j > this.first ? lines[j - 1][1] : lines[this.first][0];
    if (this.last === j + 1) {
      // If a long line with a bar becomes the head of a table, it is drawn once more.
      const line = this.list.line(j);
      if (line.length >= (line.includes("|") ? APPEND_FROM : TELLING)) sure = lines[j][1];
    }
    this.text.draw(lines, this.first, this.last, sure, open);
  }
}

// All that is left, where blocks stand too deep in each other.
class Rest extends Paragraph {
  takes() { return IN; }
  isClosed() { return false; }
}

class Heading extends Block {
  constructor(...args) {
    super(...args);
    this.place(el("h" + Math.min(6, this.mark.trim().length + 2))); // the page has levels of its own above
    this.text = new GrowingText(this.list.track, this.node);
  }

  isClosed() { return this.first < this.list.whole; }

  draw(open) {
    const { text } = this.list.track;
    const [from, b] = this.list.lines[this.first];
    const a = from + this.mark.length;
    const end = headingEnd(text, a, b);
    this.text.draw([[a, end]], 0, 1, end, open);
  }
}

class Rule extends Block {
  constructor(...args) {
    super(...args);
    this.place(el("hr"));
  }

  isClosed() { return this.first < this.list.whole; }
}

class Code extends Block {
  constructor(...args) {
    super(...args);
    const [, , fence, lang] = FENCE.exec(this.mark) ?? [null, null, "", "html"];
    this.fence = fence; // "": a page without a fence around it
    this.code = new CodeBlock(this.list.track, lang, this.list.say);
    this.place(this.code.node);
    if (!fence) this.begun = this.first;
  }

  takes(j, last, final) {
    const line = this.list.line(j), whole = j < this.list.whole || final;
    if (!this.fence) return whole && PAGE_END.test(line) ? END : IN;
    if (closes(line, this.fence) && whole) return END;
    // A line of nothing but marks may become the closing fence.
    return whole || !/^\s*[`~]*\s*$/.test(line) ? IN : OUT;
  }

  isClosed() { return this.ended; }

  draw() {
    const { lines, whole } = this.list;
    const page = !this.fence && this.ended;
    this.code.grow(lines, this.fence ? this.first + 1 : this.first, page ? this.next : this.last,
      page ? this.next - 1 : whole);
  }
}

class Quote extends Block {
  constructor(...args) {
    super(...args);
    this.place(el("blockquote"));
    this.inner = this.list.inside(this.node);
  }

  takes(j) { return QUOTE.test(this.list.line(j)) ? IN : OUT; }

  draw(open) {
    const { text } = this.list.track;
    this.inner.take(this, (line) => behind(text, line, QUOTE));
    this.inner.update(!open);
  }
}

class Item extends Block {
  constructor(...args) {
    super(...args);
    const number = parseInt(this.mark, 10);
    const tag = Number.isNaN(number) ? "UL" : "OL";
    let list = this.list.node.lastElementChild;
    if (list?.tagName !== tag) {
      list = el(tag.toLowerCase(), { start: tag === "OL" && number !== 1 ? number : null });
      this.list.node.append(list);
    }
    this.node = el("li");
    list.append(this.node);
    this.inner = this.list.inside(this.node);
    this.indent = new RegExp(`^(?:\\t| {0,${Math.min(99, Math.max(2, this.mark.length))}})`);
  }

  takes(j, last, final) {
    const line = this.list.line(j);
    if (!line.trim()) return BLANK;
    if (/^(?: {2}|\t)/.test(line)) return IN;
    // A line that is not indented goes on with the item's text, but for what begins a block.
    const sure = final || j < this.list.whole || telling(line, "item");
    return last === j && sure && !opener(line) ? IN : OUT;
  }

  draw(open) {
    const { text } = this.list.track;
    this.inner.take(this, ([a, b], i) =>
      (i ? behind(text, [a, b], this.indent) : [a + this.mark.length, b]));
    this.inner.update(!open);
  }

  drop() {
    const list = this.node.parentNode;
    super.drop();
    if (!list.childNodes.length) list.remove();
  }
}

class Table extends Block {
  constructor(...args) {
    super(...args);
    this.begun = this.first + 2;
    this.body = el("tbody");
    this.table = el("table");
    this.align = null;
    this.rows = 0; // so many are drawn whole
    this.row = null; // the one that is being written
    this.place(el("div.table", { tabindex: 0, role: "region", "aria-label": "Table" }, this.table));
  }

  takes(j) {
    const line = this.list.line(j);
    return line.includes("|") && !opener(line) ? IN : OUT;
  }

  draw(open) {
    const { lines, whole, track } = this.list;
    if (!this.rows && !this.row) this.head(lines[this.first], lines[this.first + 1]);
    const from = this.first + 2;
    if (from + this.rows >= this.last) {
      this.row?.node.remove();
      this.row = null;
    }
    for (let i = from + this.rows; i < this.last; i++) {
      if (!this.row) {
        this.row = new Row(track, "td", this.align);
        this.body.append(this.row.node);
      }
      const growing = open && i >= whole;
      this.row.draw(lines[i], growing);
      if (growing) break;
      this.rows++;
      this.row = null;
    }
  }

  // Drawn anew only where the line of delimiters, still being written, says something else.
  head(line, delimiters) {
    const marks = new Row(this.list.track, "td", null).cells(delimiters)
      .map(([a, b]) => this.list.track.text.slice(a, b));
    const align = marks.map((m) => (!m.endsWith(":") ? "" : m.startsWith(":") ? "center" : "right"));
    if (align.join() === this.align?.join()) return;
    this.align = align;
    const row = new Row(this.list.track, "th", align);
    row.draw(line, false);
    this.table.replaceChildren(el("thead", {}, row.node), this.body);
  }
}

// One row of a table, cell by cell.
class Row {
  constructor(track, tag, align) {
    this.track = track;
    this.tag = tag;
    this.align = align;
    this.node = el("tr");
    this.at = -1; // where the open cell begins
    this.text = null; // of the open cell
  }

  // The cells of a line from `at` on, as [from, to] without space around them; the last is open.
  cells([a, b]) {
    const { text } = this.track;
    const found = [];
    let from = Math.max(a, this.at);
    for (let i = from; i <= b; i++) {
      if (text[i] === "\\" && i + 1 < b) { i++; continue; }
      if (i < b && text[i] !== "|") continue;
      found.push([from, i]);
      from = i + 1;
    }
    const first = this.at < 0;
    const bare = found.map(([x, y]) => trimmed(text, x, y));
    this.next = found[found.length - 1][0];
    // Bars at both ends are no cells.
    return bare.filter(([x, y], i) => x < y || !((first && i === 0) || i === bare.length - 1));
  }

  // Draws what has come of a line, of whose cells the last may be `open`.
  draw(line, open) {
    for (const cell of this.cells(line)) {
      if (!this.text) {
        const i = this.node.childNodes.length;
        const box = el(this.align[i] ? `${this.tag}.${this.align[i]}` : this.tag);
        this.node.append(box);
        this.text = new GrowingText(this.track, box);
      }
      const growing = open && cell[0] >= this.next;
      this.text.draw([cell], 0, 1, cell[1], growing);
      if (!growing) this.text = null;
    }
    this.at = this.next;
  }
}

const KINDS = {
  paragraph: Paragraph, rest: Rest, heading: Heading, rule: Rule, code: Code, page: Code,
  quote: Quote, item: Item, table: Table,
};

// ---- blocks one after the other ------------------------------------------------------------------

// What `node` holds: the answer, a quote, an item of a list. Only the last block can be open.
class BlockList {
  constructor(track, say, node, depth) {
    this.track = track;
    this.say = say;
    this.node = node;
    this.depth = depth;
    this.lines = []; // [from, to) of the source, without what marks them as lines of this list
    this.whole = 0; // how many of them can change no more
    this.first = 0; // the first that is not in a finished block
    this.block = null; // the open one
  }

  inside(node) {
    return new BlockList(this.track, this.say, node, this.depth + 1);
  }

  line(i) {
    return this.track.text.slice(...this.lines[i]);
  }

  // Takes the lines of a block of the list around it, each without its mark.
  take({ list, first, last }, cut) {
    this.lines.length = this.whole;
    for (let i = this.whole; first + i < last; i++) this.lines.push(cut(list.lines[first + i], i));
    this.whole = Math.max(this.whole, Math.min(list.whole, last) - first);
  }

  isTable(i) {
    if (i + 1 >= this.lines.length || !this.line(i).includes("|")) return false;
    const line = this.line(i + 1);
    return line.includes("|") && DELIMITERS.test(line);
  }

  // What begins at line i, and by which mark.
  begins(i) {
    if (this.depth >= MAX_DEPTH) return { kind: "rest", mark: "" };
    const line = this.line(i);
    const kind = opener(line) ?? (this.isTable(i) ? "table" : "paragraph");
    const mark = { code: FENCE, heading: HEADING, item: ITEM }[kind]?.exec(line)[0] ?? "";
    return { kind, mark };
  }

  // The block that the next lines belong to, or null where that cannot be said yet.
  current(final) {
    const { block, lines, whole } = this;
    // A table shows by its second line.
    if (block && block.first + (/table|paragraph/.test(block.kind) ? 1 : 0) < block.seen) return block;
    let i = block ? block.first : this.first;
    while (i < lines.length && isBlank(this.track.text, lines[i])) i++;
    const found = i < lines.length ? this.begins(i) : null;
    const same = block && found?.kind === block.kind && found.mark === block.mark;
    if (!same) {
      block?.drop();
      this.first = Math.max(this.first, Math.min(i, whole));
      // The fence's own line may not be complete yet.
      const waits = !found || (found.kind === "code" && i >= whole && !final);
      this.block = waits ? null : new KINDS[found.kind](this, i, found);
    }
    if (this.block) this.block.seen = whole;
    return this.block;
  }

  update(final) {
    for (let block; (block = this.current(final)); ) {
      block.scan(final);
      const open = !final && !block.isClosed();
      block.draw(open);
      if (open) return;
      this.first = block.next;
      this.block = null;
    }
  }
}

// Draws a track's text into `root`; call update() whenever it has grown.
export class MarkdownView {
  constructor(root, track, say) {
    this.track = track;
    this.list = new BlockList(track, say, root, 0);
    this.upto = 0; // of the source: what has been taken in
    this.from = 0; // where the line begins that is not whole yet
  }

  // Draws what has come, or a part of it; true where some is left for the next frame.
  update(final) {
    const { list, track } = this;
    const limit = Math.max(this.upto, track.limit(final));
    if (limit === this.upto && !final) return false;
    this.upto = final ? limit : Math.min(limit, this.upto + AT_ONCE);
    if (this.upto < limit && /[\ud800-\udbff]/.test(track.text[this.upto - 1])) this.upto--;
    list.lines.length = list.whole;
    while (this.from < this.upto) {
      const end = track.text.indexOf("\n", this.from);
      const whole = end >= 0 && end < this.upto;
      list.lines.push([this.from, whole ? end : this.upto]);
      if (!whole) break;
      list.whole++;
      this.from = end + 1;
    }
    list.update(final);
    return this.upto < limit;
  }
}
