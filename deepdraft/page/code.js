// A code block: drawn as it grows, copied, and run in the sandbox where it is a page.

import { button, copy, el } from "./dom.js";
import { openPreview } from "./preview.js";

const CHUNK_LINES = 32; // lines of one box: what is laid out anew when a line is added

export class CodeBlock {
  constructor(track, lang, say) {
    this.track = track;
    this.lines = 0; // so many are drawn whole
    this.pieces = []; // [from, to) of the source, as far as drawn
    this.code = el("code");
    this.box = null;
    this.numLines = 0; // of the box
    const name = lang.slice(0, 40) || "text"; // a name is as long as the model likes
    this.bar = el("div.code-bar", {}, el("span.lang", {}, name));
    this.bar.append(button("Copy", () => copy(this.source(), say), { class: "quiet" }));
    if (/^(html?|xhtml|svg)$/i.test(lang)) this.runs();
    const pre = el("pre", { tabindex: 0, role: "region", "aria-label": `Code, ${name}` }, this.code);
    this.node = el("div.code", {}, this.bar, pre);
  }

  source() {
    return this.pieces.map(([a, b]) => this.track.text.slice(a, b)).join("");
  }

  runs() {
    const run = button("Run", () => {
      const open = this.node.nextElementSibling?.classList.contains("preview");
      if (open) this.node.nextElementSibling.remove();
      else {
        const preview = openPreview(() => this.source(), () => {
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

  // Draws what has come of lines [first, last), the line breaks of those before `whole` too.
  grow(lines, first, last, whole) {
    for (let i = first + this.lines; i < last; i++) {
      const [a, b] = lines[i];
      this.#draw(a, i < whole ? b + 1 : b);
      if (i < whole) this.lines++;
    }
  }

  #draw(a, b) {
    const piece = this.pieces.at(-1);
    const drawn = piece?.[1] ?? -1;
    if (b <= drawn) return;
    if (!this.box || this.numLines >= CHUNK_LINES) {
      this.box = el("span.lines");
      this.code.append(this.box);
      this.numLines = 0;
    }
    this.track.draw(this.box, Math.max(a, drawn), b);
    if (a <= drawn) piece[1] = b;
    else this.pieces.push([a, b]);
    if (this.track.text[b - 1] === "\n") this.numLines++;
  }
}
