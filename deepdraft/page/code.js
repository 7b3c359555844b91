// A code block: drawn as it grows, copied, and run in the sandbox where it is a page.

import { button, copy, el } from "./dom.js";
import { openPreview } from "./preview.js";

const CHUNK_LINES = 32; // lines of one box: what is laid out anew when a line is added

export class CodeBlock {
  // Code from source position `start` on; `fence` "": a page without a fence around it.
  constructor(track, lang, start, fence, say) {
    this.track = track;
    this.fence = fence;
    this.drawn = start; // everything before this is drawn
    this.line = start; // where the line begins that is looked at for a fence
    this.source = () => track.text.slice(start, this.drawn);
    this.code = el("code");
    this.box = null;
    this.numLines = 0;
    const name = lang || "text";
    this.bar = el("div.code-bar", {}, el("span.lang", {}, name));
    this.bar.append(button("Copy", () => copy(this.source(), say), { class: "quiet" }));
    if (/^(html?|xhtml|svg)$/i.test(lang)) this.runs();
    const pre = el("pre", { tabindex: 0, role: "region", "aria-label": `Code, ${name}` }, this.code);
    this.node = el("div.code", {}, this.bar, pre);
  }

  runs() {
    const run = button("Run", () => {
      const open = this.node.nextElementSibling?.classList.contains("preview");
      if (open) this.node.nextElementSibling.remove();
      else {
        const preview = openPreview(this.source, () => {
          run.setAttribute("aria-expanded", "false");
          run.focus();
        });
        this.node.after(preview);
        preview.scrollIntoView({ block: "nearest" });
      }
      run.setAttribute("aria-expanded", String(!open));
    }, { class: "run", "aria-expanded": "false", title: "Runs in a sandbox without a network" });
    this.bar.append(run);
  }

  // Draws up to `limit`; returns the position behind the block where it ends, else -1.
  grow(limit, final) {
    const { text } = this.track;
    for (;;) {
      let end = text.indexOf("\n", this.line);
      const whole = end >= 0 && end < limit;
      if (!whole) end = limit;
      const line = text.slice(this.line, end);
      if ((whole || final) && this.#ends(line)) {
        if (!this.fence) this.#draw(end);
        return whole ? end + 1 : limit;
      }
      if (!whole) {
        // A line of nothing but marks may become the closing fence.
        const sure = final || !this.fence || !/^\s*[`~]*\s*$/.test(line);
        if (sure) this.#draw(limit);
        return final ? limit : -1;
      }
      this.#draw(end + 1);
      this.line = end + 1;
    }
  }

  #ends(line) {
    if (!this.fence) return /<\/html>/i.test(line);
    const run = line.trim();
    return run.length >= this.fence.length && run === this.fence[0].repeat(run.length);
  }

  #draw(to) {
    const { text } = this.track;
    while (this.drawn < to) {
      let end = text.indexOf("\n", this.drawn) + 1;
      if (end <= 0 || end > to) end = to;
      if (!this.box || this.numLines >= CHUNK_LINES) {
        this.box = el("span.lines");
        this.code.append(this.box);
        this.numLines = 0;
      }
      this.track.draw(this.box, this.drawn, end);
      if (text[end - 1] === "\n") this.numLines++;
      this.drawn = end;
    }
  }

  // Draws lines that do not stand together in the source, as in a list.
  whole(lines) {
    this.source = () => lines.map(([a, b]) => this.track.text.slice(a, b)).join("\n");
    this.box = el("span.lines");
    this.code.append(this.box);
    for (const [a, b] of lines) this.track.draw(this.box, a, Math.min(b + 1, this.track.text.length));
  }
}
