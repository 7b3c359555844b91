// Which token each character of a text came from, and what is known of that token.

import { el, num, shown } from "./dom.js";

export const ORIGINS = {
  accepted: ["accepted", "a draft that the model let stand"],
  corrected: ["corrected", "the model's own token in place of a draft that fell"],
  bonus: ["bonus", "one more after a block that stood as a whole"],
  plain: ["plain", "decoded without drafts"],
};

const text = (value) => (typeof value === "string" ? value : "");
const number = (value, other = null) => (Number.isFinite(value) ? value : other);

// A step as the page needs it, or null where it is none: what is missing or of another kind than
// expected is left out, what the page does not know is passed over.
export function readStep(raw) {
  if (!raw || typeof raw !== "object" || !Array.isArray(raw.tokens)) return null;
  const tokens = raw.tokens.filter((token) => token && typeof token === "object").map((token) => ({
    id: number(token.id),
    text: text(token.text),
    part: text(token.part),
    origin: Object.hasOwn(ORIGINS, token.origin) ? token.origin : "plain",
    confidence: number(token.confidence),
    probability: number(token.probability),
  }));
  const { rejected } = raw;
  const rows = Math.min(64, Math.max(1, Math.round(number(raw.rows, 1))));
  return {
    index: number(raw.index, 1),
    rows,
    accepted: Math.min(rows - 1, Math.max(0, Math.round(number(raw.accepted, 0)))),
    ms: Math.max(0, number(raw.ms, 0)),
    draft_ms: Math.max(0, number(raw.draft_ms, 0)),
    tokens,
    rejected: rejected && typeof rejected === "object"
      ? { text: text(rejected.text), confidence: number(rejected.confidence) } : null,
  };
}

// Which of ascending numbers is the first behind `position`.
export function firstBehind(numbers, position) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (numbers[mid] <= position) low = mid + 1;
    else high = mid;
  }
  return low;
}

// A growing text and its tokens. Text comes from the deltas, which are the truth; tokens come
// from the step events and are laid over it. What cannot be matched stays without a token.
export class Track {
  constructor() {
    this.text = "";
    this.starts = []; // token i covers [starts[i], ends[i])
    this.ends = [];
    this.tokens = [];
    this.pending = [];
    this.matched = 0; // everything before this has its token
    this.lost = false;
    this.watched = false; // step events come
  }

  append(text) {
    this.text += text;
  }

  push(token) {
    this.watched = true;
    this.pending.push(token);
  }

  // Lays tokens over the text that has arrived. `final`: nothing more comes.
  align(final) {
    let i = 0;
    for (; i < this.pending.length && !this.lost; i++) {
      const token = this.pending[i];
      let piece = token.text;
      const rest = this.text.length - this.matched;
      if (this.matched === 0 && !this.text.startsWith(piece)) piece = piece.replace(/^\n+/, "");
      if (piece.length > rest) {
        if (!final && this.text.endsWith(piece.slice(0, rest))) break;
        piece = piece.slice(0, rest); // white space at the end is taken off an answer
      }
      if (!this.text.startsWith(piece, this.matched)) {
        this.lost = true;
        break;
      }
      this.starts.push(this.matched);
      this.matched += piece.length;
      this.ends.push(this.matched);
      this.tokens.push(token);
    }
    this.pending.splice(0, i);
    if (this.lost) this.pending.length = 0;
  }

  // Up to where the text may be drawn: behind that a token is still to come.
  limit(final) {
    return final || this.lost || !this.watched ? this.text.length : this.matched;
  }

  // Appends text [a, b) to a node, one span for each token.
  draw(parent, a, b) {
    if (a >= b) return;
    let i = firstBehind(this.ends, a);
    while (a < b) {
      while (i < this.tokens.length && this.ends[i] <= a) i++;
      if (i >= this.tokens.length || this.starts[i] >= b) {
        parent.append(this.text.slice(a, b));
        return;
      }
      const to = Math.min(b, this.ends[i]);
      const span = document.createElement("span");
      span.className = "t " + this.tokens[i].origin;
      span.dataset.i = i;
      span.dataset.s = this.tokens[i].step.index;
      span.append(this.text.slice(a, to));
      parent.append(span);
      a = to;
    }
  }
}

export function stepLine(step) {
  const what = step.index ? `step ${step.index}` : "prompt";
  const parts = [what, step.index ? `${step.rows} ${step.rows === 1 ? "row" : "rows"}` : null,
    step.rows > 1 ? `${step.accepted} accepted` : null, `${num(step.ms, 1)} ms`,
    step.draft_ms ? `${num(step.draft_ms, 1)} of them drafting` : null];
  return parts.filter(Boolean).join(", ");
}

// What the tooltip says of a token.
export function describe(token) {
  const [name, meaning] = ORIGINS[token.origin];
  const step = token.step;
  const rows = el("dl");
  const row = (term, value) => rows.append(el("dt", {}, term), el("dd", {}, value));
  if (token.confidence != null) row("confidence", num(token.confidence, 3));
  row("probability", num(token.probability, 3));
  if (token.origin === "corrected" && step.rejected) {
    row("instead of", shown(step.rejected.text));
    row("its confidence", num(step.rejected.confidence, 3));
  }
  row("token", String(token.id));
  return [
    el("p.tip-text", {}, shown(token.text)),
    el("p.tip-origin", {}, el(`span.chip.${token.origin}`, {}, name), " " + meaning),
    rows,
    el("p.tip-step", {}, stepLine(step)),
  ];
}
