// One answer while it grows and afterwards: thinking, text, tokens, steps, figures, buttons.

import { $, button, copy, el, num, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { Strip } from "./strip.js";
import { Track, describe, readStep } from "./tokens.js";

const answers = new WeakMap(); // article -> Answer

export class Answer {
  // `label`: a heading, for answers side by side. `actions`: {retry, say}.
  constructor(actions, label = null) {
    this.actions = actions;
    this.reasoning = new Track();
    this.content = new Track();
    this.ids = [];
    this.usage = null;
    this.report = null;
    this.reason = null; // finish reason, "stopped" or "error"
    this.times = { begin: performance.now(), first: 0, end: 0, thought: 0 };
    this.thoughts = el("div.md", { "data-track": "reasoning" });
    this.summary = el("summary", {}, "Thinking");
    this.fold = el("details.thinking", { hidden: true }, this.summary, this.thoughts);
    this.body = el("div.md", { "data-track": "content" });
    this.note = el("p.note", { hidden: true });
    this.waits = el("span", {}, "waiting for the first token");
    this.wait = el("p.wait", {}, el("span.pulse"), this.waits);
    this.figures = el("p.figures");
    this.buttons = el("div.buttons");
    this.strip = new Strip((step) => this.mark(step?.index ?? null));
    this.strip.node.hidden = true;
    this.node = el("article.answer", { "aria-busy": "true", "aria-label": label ?? "Answer" },
      label ? el("h3.label", {}, label) : null,
      this.fold, this.body, this.wait, this.note, this.strip.node,
      el("footer", {}, this.figures, this.buttons));
    this.thoughtsView = new MarkdownView(this.thoughts, this.reasoning, actions.say);
    this.contentView = new MarkdownView(this.body, this.content, actions.say);
    this.frame = 0;
    this.drawn = 0; // when, and how long it took
    this.cost = 0;
    answers.set(this.node, this);
  }

  chunk(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { reasoning_content: thought, content } = choice.delta ?? {};
    const step = readStep(choice.step);
    const now = performance.now();
    if (thought || content || step) this.times.first ||= now;
    this.times.end = now;
    if (thought) this.reasoning.append(thought);
    if (content) {
      if (this.reasoning.text) this.times.thought ||= now;
      this.content.append(content);
    }
    if (step) this.#step(step);
    if (choice.speculation) this.report = choice.speculation;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.#schedule();
  }

  // How far a long prompt is.
  reading({ done, total, rate, left }) {
    this.waits.textContent =
      `reading the prompt: ${num(done)} of ${num(total)} tokens, ${num(rate)} a second, ${num(left)} s left`;
  }

  #step(step) {
    this.strip.push(step);
    for (const token of step.tokens) {
      token.step = step;
      this.ids.push(token.id);
      if (token.part === "reasoning") this.reasoning.push(token);
      else if (token.part === "content") this.content.push(token);
    }
  }

  // Draws at most once a frame, and never more than a third of the time.
  #schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.reason) return;
      if (performance.now() < this.drawn + 2 * this.cost) this.#schedule();
      else this.draw(false);
    });
  }

  draw(final) {
    const begin = performance.now();
    const bottom = nearBottom();
    let left = false;
    if (this.reasoning.text) {
      this.reasoning.align(final);
      left = this.thoughtsView.update(final);
      this.fold.hidden = false;
    }
    this.content.align(final);
    left = this.contentView.update(final) || left;
    this.wait.hidden = final || Boolean(this.times.first);
    this.#tell(final);
    if (this.strip.steps.length) {
      this.strip.node.hidden = false;
      this.strip.draw();
    }
    if (bottom) toBottom();
    this.drawn = performance.now();
    this.cost = this.drawn - begin;
    if (left) this.#schedule();
  }

  #tell(final) {
    const { begin, first, end, thought } = this.times;
    const tokens = this.usage?.completion_tokens ?? this.ids.length;
    const ms = end - first;
    if (this.reasoning.text) {
      const done = final || thought;
      const many = this.usage?.completion_tokens_details?.reasoning_tokens || this.reasoning.tokens.length;
      this.summary.textContent = (done ? `Thought for ${seconds((thought || end) - first)}` : "Thinking")
        + (many ? `, ${num(many)} tokens` : "");
    }
    if (!first) return;
    const parts = [];
    if (tokens) parts.push(`${num(tokens)} tokens`);
    if (tokens > 1 && ms > 0) parts.push(`${num(((tokens - 1) / ms) * 1000)} tok/s`);
    if (this.strip.totals.decoded) parts.push(`${num(this.strip.acceptedLength, 2)} accepted length`);
    if (final) parts.push(`first token after ${seconds(first - begin)}`, `${seconds(end - begin)} in all`);
    const cached = this.usage?.prompt_tokens_details;
    if (cached) {
      const source = cached.cached_tokens ? `, ${num(cached.cached_tokens)} from the cache` : "";
      parts.push(`prompt ${num(this.usage.prompt_tokens)}${source}`);
    }
    this.figures.textContent = parts.join("  ·  ");
  }

  // Ends the answer. `reason`: the finish reason, "stopped", or "error" with a `message`.
  finish(reason, message = "") {
    if (this.frame) cancelAnimationFrame(this.frame);
    const bottom = nearBottom();
    this.frame = 0;
    this.reason = reason;
    this.times.end ||= performance.now();
    this.draw(true);
    const text = {
      length: "Cut off: the limit of tokens was reached.",
      stopped: "Stopped.",
      error: message,
    }[reason];
    if (text) this.say(text, reason === "error");
    this.node.setAttribute("aria-busy", "false");
    this.offer();
    if (bottom) toBottom();
  }

  offer() {
    const { retry, say } = this.actions;
    this.buttons.replaceChildren(
      button("Copy", () => copy(this.content.text, say), { class: "quiet" }),
      ...(retry ? [button("Retry", retry, { class: "quiet" })] : []),
    );
  }

  say(text, bad = false) {
    this.note.textContent = text;
    this.note.classList.toggle("bad", bad);
    this.note.hidden = false;
  }

  // Shows a text that came earlier, without its tokens.
  restore({ reasoning, content, note }) {
    this.reasoning.append(reasoning ?? "");
    this.content.append(content);
    this.reason = "restored";
    this.wait.hidden = true;
    this.node.setAttribute("aria-busy", "false");
    if (reasoning) {
      this.fold.hidden = false;
      this.summary.textContent = "Thoughts";
      this.thoughtsView.update(true);
    }
    this.contentView.update(true);
    if (note) this.say(note);
    this.offer();
  }

  // Marks the tokens of one step.
  mark(index) {
    for (const old of this.node.querySelectorAll(".t.hot")) old.classList.remove("hot");
    if (index === null) return;
    for (const span of this.node.querySelectorAll(`.t[data-s="${index}"]`)) span.classList.add("hot");
  }

  token(span) {
    const track = span.closest("[data-track]").dataset.track;
    return this[track].tokens[span.dataset.i];
  }

  get tokensPerSecond() {
    const ms = this.times.end - this.times.first;
    return ms > 0 ? (1000 * (this.ids.length - 1)) / ms : NaN;
  }
}

const scroller = () => $("log");

function nearBottom() {
  const box = scroller();
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

export function toBottom() {
  const box = scroller();
  box.scrollTop = box.scrollHeight;
}

// One tooltip for all tokens of all answers.
export function watchTokens(root) {
  const tip = $("tip");
  let over = null;
  let whose = null; // kept, as a span that is drawn anew leaves the document
  const hide = () => {
    tip.hidden = true;
    whose?.strip.select(-1);
    over = whose = null;
  };
  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest?.(".t");
    if (span === over) return;
    if (!span || !document.documentElement.classList.contains("origins")) return hide();
    const answer = answers.get(span.closest("article"));
    const token = answer?.token(span);
    if (!token) return hide();
    if (whose !== answer) whose?.strip.select(-1);
    over = span;
    whose = answer;
    tip.replaceChildren(...describe(token));
    tip.hidden = false;
    const at = span.getClientRects()[0];
    const box = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - box.width - 8));
    const below = at.bottom + 6 + box.height < innerHeight;
    tip.style.left = left + "px";
    tip.style.top = (below ? at.bottom + 6 : at.top - box.height - 6) + "px";
    answer.strip.select(answer.strip.steps.indexOf(token.step));
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("scroll", hide);
}
