// The steps of one answer as a row of columns: rows verified, what of them stood, milliseconds.

import { el, num, shown } from "./dom.js";
import { stepLine } from "./tokens.js";

const COLUMN = 6, GAP = 1.5, CELL = 6, CELL_GAP = 1.5, TIME_HEIGHT = 18, BAND_GAP = 5;

const strips = new WeakMap(); // view -> Strip
let palette = null; // looked up once, as asking for styles in every frame costs a layout

function colours() {
  if (!palette) {
    const css = getComputedStyle(document.documentElement);
    const names = ["accepted", "corrected", "bonus", "plain", "lost", "time", "hot"];
    palette = Object.fromEntries(names.map((name) => [name, css.getPropertyValue("--" + name)]));
  }
  return palette;
}

// Canvases do not follow the style sheet by themselves.
export function redrawStrips() {
  palette = null;
  for (const view of document.querySelectorAll(".strip-view")) strips.get(view)?.draw();
}

// A token in words, for who cannot hover over it.
function spoken({ text, origin, confidence, probability }) {
  const sure = confidence == null ? "" : `, confidence ${num(confidence, 2)}`;
  return `${shown(text)} ${origin}${sure}, probability ${num(probability, 2)}`;
}

export class Strip {
  // `onSelect(step | null)`: the step that is looked at.
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.steps = [];
    this.first = 0; // the first step in view
    this.following = true;
    this.selected = -1;
    this.mostRows = 6;
    this.totals = { steps: 0, decoded: 0, ms: 0, rows: 0, accepted: 0 };
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.view = el("div.strip-view", {
      tabindex: 0, role: "slider", "aria-label": "Steps of this answer",
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no step yet",
    }, this.canvas);
    this.readout = el("p.readout");
    this.node = el("div.strip", {}, this.view, this.readout);
    this.view.addEventListener("pointermove", (event) => this.#point(event));
    this.view.addEventListener("pointerleave", () => this.select(-1));
    this.view.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.view.addEventListener("keydown", (event) => this.#key(event));
    this.view.addEventListener("blur", () => this.select(-1));
    strips.set(this.view, this);
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.draw();
    }).observe(this.view);
  }

  push(step) {
    this.steps.push(step);
    this.mostRows = Math.max(this.mostRows, step.rows);
    const sum = this.totals;
    if (step.index) {
      sum.steps++;
      sum.decoded += step.tokens.length;
      sum.ms += step.ms;
      sum.rows += step.rows;
      sum.accepted += step.accepted;
    }
  }

  get numVisible() {
    return Math.max(1, Math.floor(this.width / (COLUMN + GAP)));
  }

  draw() {
    const { width } = this;
    if (!width) return;
    const shownSteps = this.numVisible;
    const last = Math.max(0, this.steps.length - shownSteps);
    this.first = this.following ? last : Math.min(this.first, last);
    const rowsHeight = this.mostRows * (CELL + CELL_GAP);
    const height = rowsHeight + BAND_GAP + TIME_HEIGHT;
    const scale = devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      this.view.style.height = height + "px"; // a property, which the policy on styles lets pass
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const upto = Math.min(this.steps.length, this.first + shownSteps);
    for (let i = this.first; i < upto; i++) {
      this.#column(pen, colours(), i, (i - this.first) * (COLUMN + GAP), rowsHeight);
    }
    this.view.setAttribute("aria-valuemax", Math.max(0, this.steps.length - 1));
    this.#read();
  }

  #column(pen, palette, i, x, rowsHeight) {
    const step = this.steps[i];
    if (i === this.selected) {
      pen.fillStyle = palette.hot;
      pen.fillRect(x - GAP / 2, 0, COLUMN + GAP, rowsHeight + BAND_GAP + TIME_HEIGHT);
    }
    const last = step.tokens.at(-1)?.origin ?? "plain";
    for (let row = 0; row < step.rows; row++) {
      const y = rowsHeight - (row + 1) * (CELL + CELL_GAP);
      if (row <= step.accepted) {
        // From below: the drafts that stood, then the token that follows them.
        pen.fillStyle = palette[row < step.accepted ? "accepted" : last === "accepted" ? "plain" : last];
        pen.fillRect(x, y, COLUMN, CELL);
      } else {
        pen.strokeStyle = palette.lost;
        pen.lineWidth = 1;
        pen.strokeRect(x + 0.5, y + 0.5, COLUMN - 1, CELL - 1);
      }
    }
    if (step.index && this.totals.ms) {
      // Up to three times the mean: one slow step would flatten all others.
      const share = (step.ms * this.totals.steps) / this.totals.ms / 3;
      const tall = Math.max(1, TIME_HEIGHT * Math.min(1, share));
      pen.fillStyle = palette.time;
      pen.fillRect(x, rowsHeight + BAND_GAP, COLUMN, tall);
    }
  }

  #read() {
    const step = this.steps[this.selected];
    if (step) {
      const text = step.tokens.map((token) => shown(token.text)).join(" ");
      this.readout.textContent = `${stepLine(step)}: ${text}`;
      this.view.setAttribute("aria-valuenow", this.selected);
      this.view.setAttribute("aria-valuetext", `${stepLine(step)}: ${step.tokens.map(spoken).join("; ")}`);
      return;
    }
    const line = this.summary();
    this.readout.textContent = line;
    this.view.setAttribute("aria-valuetext", line);
  }

  get acceptedLength() {
    return this.totals.steps ? 1 + this.totals.accepted / this.totals.steps : NaN;
  }

  summary() {
    const { steps, decoded, ms, rows } = this.totals;
    if (!steps) return "no step yet";
    return `${num(steps)} steps, ${num(decoded / steps, 2)} tokens and ${num(rows / steps, 2)} rows a step, `
      + `${num(ms / steps, 1)} ms a step`;
  }

  select(i) {
    if (i === this.selected) return;
    this.selected = i;
    if (i >= 0) this.#bring(i);
    this.draw();
    this.onSelect(this.steps[i] ?? null);
  }

  #bring(i) {
    const many = this.numVisible;
    if (i < this.first) this.first = i;
    else if (i >= this.first + many) this.first = i - many + 1;
    else return;
    this.following = this.first + many >= this.steps.length;
  }

  #point(event) {
    const i = this.first + Math.floor(event.offsetX / (COLUMN + GAP));
    this.select(i < this.steps.length ? i : -1);
  }

  #wheel(event) {
    const last = this.steps.length - this.numVisible;
    const by = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (last <= 0 || !by) return;
    event.preventDefault();
    this.first = Math.max(0, Math.min(last, this.first + Math.round(by / COLUMN)));
    this.following = this.first >= last;
    this.draw();
  }

  #key(event) {
    const many = this.numVisible;
    const from = this.selected < 0 ? this.first - 1 : this.selected;
    const to = {
      ArrowRight: from + 1, ArrowUp: from + 1, ArrowLeft: from - 1, ArrowDown: from - 1,
      PageUp: from + many, PageDown: from - many, Home: 0, End: this.steps.length - 1,
    }[event.key];
    if (to === undefined || !this.steps.length) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(this.steps.length - 1, to)));
  }
}
