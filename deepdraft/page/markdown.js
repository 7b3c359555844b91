// Markdown as it grows, drawn into the document.
//
// Every visible character is a character of the source, so that tokens can be laid over it
// (Track.draw). Nothing is ever parsed as markup by the browser: HTML in an answer is text, or a
// code block that can be run in a sandbox. What is complete is drawn once; only the last block is
// drawn anew as it grows, and long code and long paragraphs are appended to.

import { el } from "./dom.js";
import { CodeBlock } from "./code.js";

const MAX_DEPTH = 8;
const WINDOW = 2000; // how far the end of an emphasis or a link is looked for
const APPEND_FROM = 400; // paragraphs longer than this are appended to
const TELLING = 24; // characters of a line that surely say what it begins

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const PAGE = /^\s{0,3}<(?:!doctype\s+html|html[\s>])/i;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SPECIAL = /[\\`*_~[<]|!\[|https?:\/\//g;
const MAY_BEGIN = /[\\`*_~[<!h\udc00-\udfff]/; // a construct, or the second half of a character
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

// Lines as [from, to) of the source, without their line breaks.
function linesOf(text, from, to) {
  const lines = [];
  while (from < to) {
    let end = text.indexOf("\n", from);
    if (end < 0 || end > to) end = to;
    lines.push([from, end]);
    from = end + 1;
  }
  return lines;
}

const closes = (line, fence) => {
  const run = line.trim();
  return run.length >= fence.length && /^ {0,3}\S/.test(line) && run === fence[0].repeat(run.length);
};

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

const isTable = (text, lines, i) => {
  if (i + 1 >= lines.length || !text.slice(...lines[i]).includes("|")) return false;
  const line = text.slice(...lines[i + 1]);
  return line.includes("|") && DELIMITERS.test(line);
};

// The block that begins at line i: its kind, its lines, and the line behind it.
function blockAt(text, lines, i) {
  const get = (j) => text.slice(...lines[j]);
  const line = get(i);
  const kind = opener(line);
  let j = i + 1;
  if (kind === "code") {
    const [, , fence, lang] = FENCE.exec(line);
    while (j < lines.length && !closes(get(j), fence)) j++;
    return { kind, fence, lang, first: i + 1, last: j, next: Math.min(j + 1, lines.length) };
  }
  if (kind === "page") {
    j = i;
    while (j < lines.length && !/<\/html>/i.test(get(j))) j++;
    j = Math.min(j + 1, lines.length);
    return { kind: "code", fence: "", lang: "html", first: i, last: j, next: j };
  }
  if (kind === "heading" || kind === "rule") return { kind, first: i, last: j, next: j };
  if (kind === "quote") {
    while (j < lines.length && QUOTE.test(get(j))) j++;
    return { kind, first: i, last: j, next: j };
  }
  if (kind === "item") return { kind, ...itemEnd(get, lines.length, i) };
  if (isTable(text, lines, i)) {
    j = i + 2;
    while (j < lines.length && get(j).includes("|") && !opener(get(j))) j++;
    return { kind: "table", first: i, last: j, next: j };
  }
  while (j < lines.length && get(j).trim() && !isTable(text, lines, j)) {
    const other = opener(get(j));
    // A line such as "2024. It was" goes on with the paragraph.
    if (other && !(other === "item" && /^ *\d/.test(get(j)) && !/^ *1[.)]/.test(get(j)))) break;
    j++;
  }
  return { kind: "paragraph", first: i, last: j, next: j };
}

function itemEnd(get, count, i) {
  let j = i + 1, last = j;
  for (; j < count; j++) {
    const line = get(j);
    if (!line.trim()) continue;
    const lazy = last === j && !opener(line);
    if (!/^(?: {2}|\t)/.test(line) && !lazy) break;
    last = j + 1;
  }
  return { first: i, last, next: last };
}

// Whether a line that is still being written already says what it begins.
function telling(line, kind) {
  if (!line.trim() || kind === "table" || /^ {0,3}`{3}/.test(line)) return false;
  return line.length >= TELLING || /^ {0,3}(?:>|#{1,6}[ \t]+\S)/.test(line) || /^\p{L}/u.test(line)
    || /^ {0,3}(?:[-*+]|\d{1,9}[.)])[ \t]+[^\s*\-_]/.test(line);
}

// Whether nothing that may still come can change a block any more. `ended`: the last line is whole.
function isClosed(text, lines, block, ended) {
  const { kind, next } = block;
  const whole = (j) => j < lines.length - 1 || ended;
  if (kind === "heading" || kind === "rule") return whole(block.first);
  for (let j = next; j < lines.length; j++) {
    const line = text.slice(...lines[j]);
    if (!line.trim()) {
      if (whole(j) && kind !== "item") return true;
      continue;
    }
    // A table shows by its second line.
    if (line.includes("|") && !whole(j + 1)) return false;
    return whole(j) || telling(line, kind);
  }
  return false;
}

const strip = (text, [a, b], pattern) => {
  const found = pattern.exec(text.slice(a, b));
  return [found ? a + found[0].length : a, b];
};

const safeLink = (address) => {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative ones would lead into this server
  }
};

const anchor = (href) =>
  el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href });

// Text with emphasis, code and links, made of pieces of the source.
class Inline {
  constructor(track, segments) {
    this.track = track;
    this.segments = segments;
    this.starts = [];
    let at = 0;
    for (const [a, b] of segments) {
      this.starts.push(at);
      at += b - a + 1;
    }
    this.s = segments.map(([a, b]) => track.text.slice(a, b)).join("\n");
    this.failed = Infinity; // the first mark that may still become something else
    this.spans = []; // [begin, end) of what stands outermost
    this.links = [-1, -1]; // a place, and where "](" is next from there on
  }

  // parent null: nothing is drawn.
  text(parent, i, end) {
    if (!parent) return;
    for (let k = 0; k < this.segments.length && i < end; k++) {
      const [a, b] = this.segments[k];
      const from = this.starts[k];
      const to = from + (b - a) + 1; // with the line break
      if (i >= to) continue;
      const upto = Math.min(end, to);
      this.track.draw(parent, a + i - from, a + upto - from);
      i = upto;
    }
  }

  parse(parent, i = 0, end = this.s.length, depth = 0) {
    let from = i;
    const put = (to) => this.text(parent, from, to);
    while (i < end) {
      SPECIAL.lastIndex = i;
      const found = SPECIAL.exec(this.s);
      if (!found || found.index >= end) break;
      i = found.index;
      const span = depth < MAX_DEPTH ? this.span(found[0], i, end, depth) : null;
      if (!span) {
        if (depth === 0 && i > end - WINDOW) this.failed = Math.min(this.failed, i);
        i += "`*_~".includes(found[0]) ? this.run(i, end) : found[0].length;
        continue;
      }
      put(i);
      if (parent) span.draw(parent);
      else this.spans.push([i, span.next]);
      if (this.grows(span, end)) this.failed = Math.min(this.failed, i);
      i = from = span.next;
    }
    put(end);
  }

  // Whether more text could change a construct: more marks at its end, more of an address.
  grows({ next, bare, loose }, end) {
    return loose || (bare ? !/[\s<>"'`)\]]/.test(this.s.slice(next, end)) : next >= end);
  }

  run(i, end) {
    let n = 1;
    while (i + n < end && this.s[i + n] === this.s[i]) n++;
    return n;
  }

  // The construct at i: {next, draw(parent)}, or null where there is none.
  span(mark, i, end, depth) {
    if (mark === "\\") return this.escape(i, end);
    if (mark === "`") return this.code(i, end);
    if (mark === "*" || mark === "_" || mark === "~") return this.emphasis(i, end, depth);
    if (mark === "[" || mark === "![") return this.link(i, end, depth, mark === "![");
    return this.address(mark, i, end);
  }

  escape(i, end) {
    if (i + 1 >= end || !PUNCTUATION.test(this.s[i + 1])) return null;
    return { next: i + 2, draw: (parent) => this.text(parent, i + 1, i + 2) };
  }

  code(i, end) {
    const n = this.run(i, end);
    const most = Math.min(end, i + WINDOW);
    for (let j = i + n; j < most; j++) {
      if (this.s[j] !== "`") continue;
      const m = this.run(j, end);
      if (m === n) {
        let [a, b] = [i + n, j];
        if (b - a > 2 && this.s[a] === " " && this.s[b - 1] === " ") { a++; b--; }
        const draw = (parent) => {
          const node = el("code");
          this.text(node, a, b);
          parent.append(node);
        };
        return { next: j + n, draw };
      }
      j += m - 1;
    }
    return null;
  }

  emphasis(i, end, depth) {
    const s = this.s, c = s[i];
    const n = Math.min(this.run(i, end), c === "~" ? 2 : 3);
    if (c === "~" && n < 2) return null;
    const next = s[i + n];
    if (i + n >= end || /\s/.test(next)) return null;
    if (c === "_" && i > 0 && WORD.test(s[i - 1])) return null;
    const most = Math.min(end, i + WINDOW);
    let loose = false; // code that begins inside may yet cover the end
    for (let j = i + n + 1; j + n <= most; j++) {
      if (s[j] === "\\") { j++; continue; }
      if (s[j] === "`") {
        const code = this.code(j, most);
        loose ||= end < i + WINDOW && (!code || code.next >= end);
        j = code ? code.next - 1 : j + this.run(j, most) - 1;
        continue;
      }
      if (s[j] !== c) continue;
      const m = this.run(j, end);
      const ends = (n === 1 ? m !== 2 : m >= n) && !/\s/.test(s[j - 1]);
      if (ends && !(c === "_" && j + m < end && WORD.test(s[j + m]))) {
        const at = j + m - n;
        const draw = (parent) => {
          let node = el(c === "~" ? "del" : n === 1 ? "em" : "strong");
          const outer = node;
          if (n === 3) { node = el("em"); outer.append(node); }
          this.parse(node, i + n, at, depth + 1);
          parent.append(outer);
        };
        return { next: at + n, draw, loose };
      }
      j += m - 1;
    }
    return null;
  }

  link(i, end, depth, image) {
    const s = this.s, open = i + (image ? 2 : 1);
    const most = Math.min(end, i + WINDOW);
    if (this.turn(i) >= most) return null;
    let level = 1, j = open;
    for (; j < most && level; j++) {
      if (s[j] === "\\") j++;
      else if (s[j] === "[") level++;
      else if (s[j] === "]") level--;
    }
    if (level || s[j] !== "(") return null;
    const rest = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.exec(
      s.slice(j, Math.min(end, j + WINDOW)),
    );
    if (!rest) return null;
    const href = safeLink(rest[1]);
    const draw = (parent) => {
      // A picture is never fetched: its address alone would tell others of the reader.
      const node = href && !image ? anchor(href) : el(image ? "span.picture" : "span");
      if (image) node.title = rest[1];
      this.parse(node, open, j - 1, depth + 1);
      parent.append(node);
    };
    return { next: j + rest[0].length, draw };
  }

  // Where the middle of the next link is; looked for once for all brackets before it.
  turn(i) {
    if (!(this.links[0] <= i && i <= this.links[1])) {
      const at = this.s.indexOf("](", i);
      this.links = [i, at < 0 ? Infinity : at];
    }
    return this.links[1];
  }

  address(mark, i, end) {
    if (mark === "<" && !/[hm]/.test(this.s[i + 1] ?? "")) return null;
    const s = this.s.slice(i, Math.min(end, i + WINDOW));
    let from = 0, found;
    if (mark === "<") {
      found = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(s);
      from = 1;
    } else {
      if (i > 0 && WORD.test(this.s[i - 1])) return null;
      found = /^(https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?])/.exec(s);
    }
    const href = found && safeLink(found[1]);
    if (!href) return null;
    const draw = (parent) => {
      const node = anchor(href);
      this.text(node, i + from, i + from + found[1].length);
      parent.append(node);
    };
    return { next: i + found[0].length, draw, bare: mark !== "<" };
  }

  // The last place up to `most` where the text can be parted without changing what either part
  // means, or 0: in no construct, and behind a space or before what begins none.
  seam(most) {
    let k = this.spans.length - 1;
    const half = /h(?:t(?:t(?:ps?(?::\/?)?)?)?)?$/.exec(this.s.slice(-8)); // of an address
    const whole = this.s.length - (half ? half[0].length : 0);
    for (let i = Math.min(most, whole); i > 0; i--) {
      while (k >= 0 && this.spans[k][0] >= i) k--;
      if (k >= 0 && this.spans[k][1] > i) {
        i = this.spans[k][0] + 1;
        continue;
      }
      if (/\s/.test(this.s[i - 1]) || !MAY_BEGIN.test(this.s[i] ?? "*")) return i;
    }
    return 0;
  }
}

// Draws a track's text into `root`; call update() whenever it has grown.
export class MarkdownView {
  constructor(root, track, say) {
    this.root = root;
    this.track = track;
    this.say = say;
    this.at = 0; // everything before this is drawn for good
    this.tail = null; // the node of the last block, to be drawn anew
    this.code = null; // a code block that is appended to
    this.paragraph = null; // {node, at, kept}: a long paragraph that is appended to
  }

  update(final) {
    const limit = this.track.limit(final);
    for (;;) {
      if (this.code) {
        const next = this.code.grow(limit, final);
        if (next < 0) return;
        this.at = next;
        this.code = null;
      }
      const lines = linesOf(this.track.text, this.at, limit);
      let i = 0;
      while (i < lines.length && !this.track.text.slice(...lines[i]).trim()) i++;
      if (i >= lines.length) {
        this.drop();
        return;
      }
      const block = blockAt(this.track.text, lines, i);
      if (block.kind === "code") {
        this.drop();
        const start = block.first < lines.length ? lines[block.first][0] : limit + 1;
        // The fence's own line may not be complete yet.
        if (block.first >= lines.length && this.track.text[limit - 1] !== "\n" && !final) return;
        this.code = new CodeBlock(this.track, block.lang, Math.min(start, this.track.text.length), block.fence, this.say);
        this.root.append(this.code.node);
        continue;
      }
      const open = !final && !isClosed(this.track.text, lines, block, this.track.text[limit - 1] === "\n");
      if (block.kind === "paragraph") this.growParagraph(lines.slice(block.first, block.last), open, limit);
      else this.redraw(lines, block, open);
      if (open) return;
      this.at = block.next < lines.length ? lines[block.next][0] : limit;
    }
  }

  drop() {
    const list = this.tail?.parentNode;
    this.tail?.remove();
    // What looked like an item may have been the only one of its list.
    if (list && list !== this.root && !list.childNodes.length) list.remove();
    this.tail = null;
    this.paragraph = null;
  }

  // Draws one block in place of the last one.
  redraw(lines, block, open) {
    this.drop();
    const node = this.block(this.root, lines, block, 0);
    if (open) this.tail = node;
  }

  growParagraph(segments, open, limit) {
    if (!this.paragraph) {
      this.drop();
      const node = el("p");
      this.root.append(node);
      this.paragraph = { node, at: segments[0][0], kept: 0 };
      this.tail = node;
    }
    const own = this.paragraph;
    while (own.node.childNodes.length > own.kept) own.node.lastChild.remove();
    const rest = segments.filter(([, b]) => b >= own.at).map(([a, b]) => [Math.max(a, own.at), b]);
    const inline = new Inline(this.track, rest);
    if (!open) {
      inline.parse(own.node);
      this.paragraph = this.tail = null;
      return;
    }
    const cut = this.settled(inline, rest, limit);
    if (cut > 0) {
      inline.parse(own.node, 0, cut);
      own.kept = own.node.childNodes.length;
      own.at = this.sourceAt(inline, cut);
    }
    inline.parse(own.node, Math.max(0, cut));
  }

  // Up to where a growing paragraph can change no more, or 0.
  settled(inline, segments, limit) {
    if (inline.s.length < APPEND_FROM) return 0;
    inline.parse(null);
    let sure = inline.s.length;
    for (let k = segments.length - 1; k >= 0; k--) {
      const [a, b] = segments[k];
      // A short last line may turn out to begin another block, one with a bar a table.
      const short = b === limit && b - a < TELLING;
      if (!short && !this.track.text.slice(a, b).includes("|")) break;
      sure = inline.starts[k];
    }
    return inline.seam(Math.min(sure, inline.failed));
  }

  sourceAt(inline, index) {
    let k = inline.starts.length - 1;
    while (inline.starts[k] > index) k--;
    return inline.segments[k][0] + index - inline.starts[k];
  }

  blocks(parent, lines, depth) {
    for (let i = 0; i < lines.length; ) {
      if (!this.track.text.slice(...lines[i]).trim()) { i++; continue; }
      const block = depth < MAX_DEPTH
        ? blockAt(this.track.text, lines, i)
        : { kind: "paragraph", first: i, last: lines.length, next: lines.length };
      this.block(parent, lines, block, depth);
      i = block.next;
    }
  }

  block(parent, lines, block, depth) {
    const { text } = this.track;
    const own = lines.slice(block.first, block.last);
    if (block.kind === "item") return this.item(parent, own, depth);
    let node;
    if (block.kind === "code") {
      const code = new CodeBlock(this.track, block.lang, own.length ? own[0][0] : 0, block.fence, this.say);
      code.whole(own);
      node = code.node;
    } else if (block.kind === "heading") {
      const level = HEADING.exec(text.slice(...own[0]))[1].length;
      node = el("h" + Math.min(6, level + 2)); // the page has levels of its own above
      let [a, b] = strip(text, own[0], HEADING);
      const closing = /[ \t]+#+[ \t]*$/.exec(text.slice(a, b));
      if (closing) b = a + closing.index;
      new Inline(this.track, [[a, b]]).parse(node);
    } else if (block.kind === "rule") node = el("hr");
    else if (block.kind === "quote") {
      node = el("blockquote");
      this.blocks(node, own.map((line) => strip(text, line, QUOTE)), depth + 1);
    } else if (block.kind === "table") node = this.table(own);
    else {
      node = el("p");
      new Inline(this.track, own).parse(node);
    }
    parent.append(node);
    return node;
  }

  item(parent, own, depth) {
    const { text } = this.track;
    const [whole, , mark] = ITEM.exec(text.slice(...own[0]));
    const tag = /\d/.test(mark) ? "OL" : "UL";
    let list = parent.lastElementChild;
    if (list?.tagName !== tag) {
      list = el(tag.toLowerCase());
      if (tag === "OL" && parseInt(mark, 10) !== 1) list.setAttribute("start", parseInt(mark, 10));
      parent.append(list);
    }
    const node = el("li");
    const indent = new RegExp(`^ {0,${Math.max(2, whole.length)}}`);
    const lines = own.map(([a, b], i) => (i ? strip(text, [a, b], indent) : [a + whole.length, b]));
    list.append(node);
    this.blocks(node, lines, depth + 1);
    return node;
  }

  table(own) {
    const { text } = this.track;
    const cells = ([a, b]) => {
      const found = [];
      let from = a;
      for (let i = a; i <= b; i++) {
        if (text[i] === "\\" && i < b) { i++; continue; }
        if (i < b && text[i] !== "|") continue;
        found.push([from, i]);
        from = i + 1;
      }
      if (found.length && !text.slice(...found[0]).trim()) found.shift();
      if (found.length && !text.slice(...found[found.length - 1]).trim()) found.pop();
      return found.map(([x, y]) => {
        while (x < y && /\s/.test(text[x])) x++;
        while (y > x && /\s/.test(text[y - 1])) y--;
        return [x, y];
      });
    };
    const align = cells(own[1]).map(([a, b]) => {
      const mark = text.slice(a, b);
      return mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "";
    });
    const row = (line, tag) => {
      const node = el("tr");
      cells(line).slice(0, Math.max(1, align.length)).forEach((cell, i) => {
        const box = el(align[i] ? `${tag}.${align[i]}` : tag);
        new Inline(this.track, [cell]).parse(box);
        node.append(box);
      });
      return node;
    };
    const body = el("tbody", {}, ...own.slice(2).map((line) => row(line, "td")));
    const table = el("table", {}, el("thead", {}, row(own[0], "th")), body);
    return el("div.table", { tabindex: 0, role: "region", "aria-label": "Table" }, table);
  }
}
