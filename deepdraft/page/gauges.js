// What the server does now, from its counters and from the last answer.

import { bytes, el, num } from "./dom.js";
import { metrics } from "./client.js";

const NS = "http://www.w3.org/2000/svg";
const KEPT = 60; // samples of a curve
const EVERY_MS = 1000, IDLE_MS = 4000;

const GAUGES = [
  ["speed", "tok/s", true],
  ["step", "ms/step", true],
  ["length", "accepted length", true],
  ["queue", "running, waiting", false],
  ["cache", "last prompt", false],
  ["memory", "memory", false],
];

export class Gauges {
  // `onState(text, ok)`: whether the server can be reached.
  constructor(list, onState) {
    this.onState = onState;
    this.boxes = new Map();
    for (const [name, label, curve] of GAUGES) {
      const value = el("dd", { id: `g-${name}` }, "–");
      const svg = curve ? document.createElementNS(NS, "svg") : null;
      let line = null;
      if (svg) {
        svg.setAttribute("viewBox", `0 0 ${KEPT} 20`);
        svg.setAttribute("preserveAspectRatio", "none");
        svg.setAttribute("aria-hidden", "true");
        line = document.createElementNS(NS, "polyline");
        svg.append(line);
      }
      list.append(el("div.gauge", {}, el("dt", {}, label), value, svg));
      this.boxes.set(name, { value, line, samples: [] });
    }
    this.last = null;
    this.busy = false;
    document.addEventListener("visibilitychange", () => this.#next(0));
    this.#next(0);
  }

  set(name, text) {
    this.boxes.get(name).value.textContent = text;
  }

  // What of the last prompt came from the cache.
  cache(usage) {
    const details = usage?.prompt_tokens_details;
    if (!details) return;
    const total = usage.prompt_tokens, cached = details.cached_tokens ?? 0;
    this.set("cache", cached
      ? `${num(cached)} of ${num(total)} cached, ${details.cache_source ?? "memory"}`
      : `${num(total)} computed`);
  }

  #curve(name, value) {
    const { line, samples } = this.boxes.get(name);
    samples.push(value);
    if (samples.length > KEPT) samples.shift();
    const top = Math.max(...samples.filter(Number.isFinite), 1e-9);
    const points = samples.map((v, i) => `${KEPT - samples.length + i},${19 - 17 * ((v || 0) / top)}`);
    line.setAttribute("points", points.join(" "));
  }

  #next(ms) {
    clearTimeout(this.timer);
    if (document.hidden) return;
    this.timer = setTimeout(() => this.#poll(), ms);
  }

  async #poll() {
    try {
      const now = { at: performance.now(), values: await metrics() };
      this.onState(true);
      this.#show(now);
      this.last = now;
    } catch {
      this.onState(false);
      this.last = null;
    }
    this.#next(this.busy ? EVERY_MS : IDLE_MS);
  }

  #show(now) {
    const get = (name) => now.values.get(`deepdraft_${name}`);
    const running = get("num_requests_running") ?? 0, waiting = get("num_requests_waiting") ?? 0;
    const wasBusy = this.busy;
    this.busy = running + waiting > 0;
    this.set("queue", `${num(running)}, ${num(waiting)}`);
    const memory = now.values.get("process_resident_memory_bytes");
    const stored = get('kv_slab_bytes{state="used"}');
    if (memory !== undefined) {
      this.set("memory", bytes(memory) + (stored ? `, cache ${bytes(stored)}` : ""));
    }
    if (!this.last) return;
    const grown = (name) => (get(name) ?? 0) - (this.last.values.get(`deepdraft_${name}`) ?? 0);
    const sum = (prefix) => {
      let total = 0;
      for (const [name, value] of now.values) {
        if (name.startsWith(prefix)) total += value - (this.last.values.get(name) ?? 0);
      }
      return total;
    };
    const steps = grown("iterations_total");
    const tokens = grown("generation_tokens_total");
    const speed = (1000 * tokens) / (now.at - this.last.at);
    // After an answer the figures stay; the curves show the pause.
    if (tokens || this.busy || wasBusy) this.#curve("speed", speed);
    if (!steps) return;
    const ms = (1000 * sum("deepdraft_iteration_seconds_total")) / steps;
    const own = sum("deepdraft_spec_decode_steps_total");
    const length = own ? 1 + grown("spec_decode_num_accepted_tokens_total") / own : NaN;
    // The last look at an answer sees a part of a second only; its rate would mislead.
    if (this.busy || this.boxes.get("speed").value.textContent === "–") this.set("speed", num(speed));
    this.set("step", num(ms, 1));
    this.set("length", num(length, 2));
    this.#curve("step", ms);
    this.#curve("length", length);
  }

  // An answer has begun: look more often at once.
  wake() {
    this.busy = true;
    this.#next(EVERY_MS / 2);
  }
}
