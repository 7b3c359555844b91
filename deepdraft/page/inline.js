// Emphasis, code and links: the text of one block, as it grows.
//
// Every visible character is a character of the source, so that tokens can be laid over it
// (Track.draw). What stands for good is drawn once; behind it a tail is drawn anew, of about WINDOW
// characters at most, as a mark in it may still find its end.

import { el } from "./dom.js";
import { firstBehind } from "./tokens.js";

const MAX_DEPTH = 8;
const WINDOW = 2000; // a construct lies within so many characters, all of them known or it may still come
export const APPEND_FROM = 400; // longer texts are appended to

const MARKS = "`*_~"; // which count by how many stand in a row

const SPECIAL = /[\\`*_~[<]|!\[|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;

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

// The constructs in a text made of pieces of the source. `before`: the character before it.
export class Inline {
  constructor(track, segments, before = "") {
    this.track = track;
    this.segments = segments;
    this.before = before;
    this.starts = [];
    let at = 0;
    for (const [a, b] of segments) {
      this.starts.push(at);
      at += b - a + 1;
    }
    this.s = segments.map(([a, b]) => track.text.slice(a, b)).join("\n");
    this.failed = Infinity; // the first mark that may still become something else
    this.links = [-1, -1]; // a place, and where "](" is next from there on
    this.spans = this.parse(0, this.s.length, 0);
  }

  // The outermost constructs of [i, end) as {begin, next, draw(parent)}. `linked`: in a link, which
  // holds no other.
  parse(i, end, depth, linked = false) {
    const spans = [];
    while (i < end) {
      SPECIAL.lastIndex = i;
      const found = SPECIAL.exec(this.s);
      if (!found || found.index >= end) break;
      i = found.index;
      const span = depth < MAX_DEPTH ? this.span(found[0], i, end, depth, linked) : false;
      const open = depth === 0 && i > end - WINDOW;
      if (open && (span === null || (span && this.grows(span, end)))) {
        this.failed = Math.min(this.failed, i);
      }
      if (span) {
        spans.push({ ...span, begin: i });
        i = span.next;
      } else i += MARKS.includes(found[0]) ? this.run(i, end) : found[0].length;
    }
    return spans;
  }

  // Draws [i, end), which parts none of `spans`.
  draw(parent, i = 0, end = this.s.length, spans = this.spans) {
    for (const span of spans) {
      if (span.begin < i) continue;
      if (span.next > end) break;
      this.text(parent, i, span.begin);
      span.draw(parent);
      i = span.next;
    }
    this.text(parent, i, end);
  }

  text(parent, i, end) {
    for (let k = this.segmentAt(i); k < this.segments.length && i < end; k++) {
      const [a, b] = this.segments[k];
      const from = this.starts[k];
      const upto = Math.min(end, from + (b - a) + 1); // with the line break
      this.track.draw(parent, a + i - from, a + upto - from);
      i = upto;
    }
  }

  segmentAt(i) {
    return Math.max(0, firstBehind(this.starts, i) - 1);
  }

  // Where a position of the source lies in this text.
  indexOf(position) {
    let k = this.segments.length - 1;
    while (k > 0 && this.segments[k][0] > position) k--;
    const [a, b] = this.segments[k];
    return this.starts[k] + Math.max(0, Math.min(position, b) - a);
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

  behind(i) {
    return i > 0 ? this.s[i - 1] : this.before;
  }

  // The construct at i: {next, draw(parent)}, null where there is none yet, false where none can be.
  span(mark, i, end, depth, linked) {
    if (i === 0 && this.before === mark && MARKS.includes(mark)) return false; // see seam
    if (mark === "\\") return this.escape(i, end);
    if (mark === "`") return this.code(i, end);
    if (mark === "*" || mark === "_" || mark === "~") return this.emphasis(i, end, depth, linked);
    if (mark === "![") return this.link(i, end, depth, linked, true);
    if (linked) return false;
    if (mark === "[") return this.link(i, end, depth, true, false);
    return this.address(mark, i, end);
  }

  escape(i, end) {
    if (i + 1 >= end) return null;
    if (!PUNCTUATION.test(this.s[i + 1])) return false;
    return { next: i + 2, draw: (parent) => this.text(parent, i + 1, i + 2) };
  }

  code(i, end) {
    const n = this.run(i, end);
    const j = this.ticks(n, i + n);
    if (j + n >= i + WINDOW || j + n > end) return null;
    let [a, b] = [i + n, j];
    if (b - a > 2 && this.s[a] === " " && this.s[b - 1] === " ") { a++; b--; }
    const draw = (parent) => {
      const node = el("code");
      this.text(node, a, b);
      parent.append(node);
    };
    return { next: j + n, draw };
  }

  // Where the next row of n backticks is from i on. The rows are looked for once: emphasis asks
  // for the code in it again and again.
  ticks(n, i) {
    if (!this.rows) {
      this.rows = new Map();
      for (const { 0: row, index } of this.s.matchAll(/`+/g)) {
        if (!this.rows.has(row.length)) this.rows.set(row.length, []);
        this.rows.get(row.length).push(index);
      }
    }
    const begins = this.rows.get(n) ?? [];
    return begins[firstBehind(begins, i - 1)] ?? Infinity;
  }

  emphasis(i, end, depth, linked) {
    const s = this.s, c = s[i];
    const n = Math.min(this.run(i, end), c === "~" ? 2 : 3);
    if (i + n >= end) return null;
    if ((c === "~" && n < 2) || /\s/.test(s[i + n])) return false;
    if (c === "_" && WORD.test(this.behind(i))) return false;
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
      if (j + m >= i + WINDOW) break;
      const ends = (n === 1 ? m !== 2 : m >= n) && !/\s/.test(s[j - 1]);
      if (ends && !(c === "_" && j + m < end && WORD.test(s[j + m]))) {
        const at = j + m - n;
        const draw = (parent) => {
          let node = el(c === "~" ? "del" : n === 1 ? "em" : "strong");
          const outer = node;
          if (n === 3) { node = el("em"); outer.append(node); }
          this.draw(node, i + n, at, this.parse(i + n, at, depth + 1, linked));
          parent.append(outer);
        };
        return { next: at + n, draw, loose };
      }
      j += m - 1;
    }
    return null;
  }

  link(i, end, depth, linked, image) {
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
      s.slice(j, most),
    );
    if (!rest) return null;
    const href = safeLink(rest[1]);
    const draw = (parent) => {
      // A picture is never fetched: its address alone would tell others of the reader.
      const node = href && !image ? anchor(href) : el(image ? "span.picture" : "span");
      if (image) node.title = rest[1];
      this.draw(node, open, j - 1, this.parse(open, j - 1, depth + 1, linked));
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
    if (mark === "<" && i + 1 < end && !/[hm]/.test(this.s[i + 1])) return false;
    const s = this.s.slice(i, Math.min(end, i + WINDOW));
    let from = 0, found;
    if (mark === "<") {
      found = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(s);
      if (!found && /.[\s<>]/s.test(s)) return false;
      from = 1;
    } else {
      if (WORD.test(this.behind(i))) return false;
      found = /^(https?:\/\/(?:[^\s<>"'`()\]]|\([^\s<>"'`()\]]*\))+(?<![.,;:!?]))/.exec(s);
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
  // means, or 0: in no construct, before no half of an address, and in no row of marks but one that
  // is too long to mean anything.
  seam(most) {
    let k = this.spans.length - 1;
    const half = /h(?:t(?:t(?:ps?(?::\/?)?)?)?)?$/.exec(this.s.slice(-8));
    const whole = this.s.length - (half ? half[0].length : 0);
    for (let i = Math.min(most, whole); i > 0; i--) {
      while (k >= 0 && this.spans[k].begin >= i) k--;
      if (k >= 0 && this.spans[k].next > i) i = this.spans[k].begin + 1;
      else if (this.parts(i)) return i;
      else if (MARKS.includes(this.s[i - 1])) {
        let from = i - 1;
        while (from > 0 && this.s[from - 1] === this.s[i - 1]) from--;
        const goesOn = from === 0 && this.before === this.s[0];
        if (goesOn || i - from >= WINDOW) return i;
        i = from + 1;
      }
    }
    return 0;
  }

  parts(i) {
    const a = this.s[i - 1], b = this.s[i];
    if (/\s/.test(a)) return true;
    if (b === undefined) return !/[\\`*_~!\ud800-\udbff]/.test(a);
    return !(a === b && MARKS.includes(a)) && !(a === "!" && b === "[") && !/[\udc00-\udfff]/.test(b);
  }
}

// The text of a paragraph, a heading or a cell in `node`, which holds nothing else.
export class GrowingText {
  constructor(track, node) {
    this.track = track;
    this.node = node;
    this.#restart();
  }

  #restart() {
    this.kept = 0; // so many nodes are drawn for good: `line` lines and
    this.line = 0;
    this.at = -1; // everything before this place of the source
    this.before = "";
  }

  // Draws lines [first, last). `sure`: up to there the source surely belongs to this text.
  draw(lines, first, last, sure, open) {
    if (this.at > lines[last - 1][1]) this.#restart(); // what seemed sure went to another block
    const { kept } = this;
    const fresh = document.createDocumentFragment();
    const rest = lines.slice(first + this.line, last);
    rest[0] = [Math.max(this.at, rest[0][0]), rest[0][1]];
    const inline = new Inline(this.track, rest, this.before);
    let cut = 0;
    if (open && inline.s.length >= APPEND_FROM) {
      cut = inline.seam(Math.min(inline.indexOf(sure), inline.failed));
    }
    if (cut > 0) {
      inline.draw(fresh, 0, cut);
      this.kept += fresh.childNodes.length;
      const k = inline.segmentAt(cut);
      this.line += k;
      this.at = rest[k][0] + cut - inline.starts[k];
      this.before = inline.s[cut - 1];
    }
    inline.draw(fresh, cut);
    this.#renew(this.node.childNodes[kept] ?? null, fresh);
  }

  // Puts what was drawn in the place of `old` and all behind it. What is there already stays: the
  // reader may have selected it, or stand on a link in it.
  #renew(old, fresh) {
    while (old && fresh.firstChild && grown(old, fresh.firstChild)) {
      fresh.firstChild.remove();
      old = old.nextSibling;
    }
    while (old) {
      const next = old.nextSibling;
      old.remove();
      old = next;
    }
    this.node.append(fresh);
  }
}

// Whether a node is, or could be made, what was drawn anew.
function grown(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.length));
    else if (old.data.startsWith(fresh.data)) old.splitText(fresh.length);
  }
  return old.isEqualNode(fresh);
}
