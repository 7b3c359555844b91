// Everything a request can be told: the form, its memory, and the body it makes.

import { el } from "./dom.js";
import { setKey, hasKey } from "./client.js";
import { read, write } from "./store.js";

const STORE = "deepdraft.params";

// [name, label, kind, options]; an empty field leaves the choice to the server.
const GROUPS = [
  ["", [
    ["model", "Model", "choice", { choices: [] }],
    ["temperature", "Temperature", "number", { min: 0, max: 2, step: 0.05, usual: 1 }],
    ["top_p", "Top-p", "number", { min: 0.01, max: 1, step: 0.01, usual: 1 }],
    ["top_k", "Top-k", "number", { min: 0, step: 1, usual: "off" }],
    ["min_p", "Min-p", "number", { min: 0, max: 1, step: 0.01, usual: 0 }],
    ["seed", "Seed", "number", { step: 1, usual: "random" }],
    ["max_tokens", "Most tokens", "number", { min: 1, step: 1, usual: "room left" }],
  ]],
  ["Drafts", [
    ["rule", "Rule", "choice", { choices: ["coupled", "token", "block"] }],
    ["drafts", "Drafts a step", "number", { min: 0, max: 15, step: 1 }],
    ["steps", "Tell each step", "flag", { on: true }],
  ]],
  ["Penalties and bias", [
    ["presence_penalty", "Presence", "number", { min: -2, max: 2, step: 0.1, usual: 0 }],
    ["frequency_penalty", "Frequency", "number", { min: -2, max: 2, step: 0.1, usual: 0 }],
    ["repetition_penalty", "Repetition", "number", { min: 0.01, max: 100, step: 0.05, usual: 1 }],
    ["logit_bias", "Bias", "lines", { hint: "token id: bias, one a line" }],
  ]],
  ["Where it ends", [
    ["stop", "Stop texts", "lines", { hint: "one a line" }],
    ["stop_token_ids", "Stop tokens", "lines", { hint: "token ids" }],
    ["ignore_eos", "Ignore the end token", "flag", {}],
  ]],
  ["Prompt", [
    ["system", "System prompt", "lines", { rows: 3 }],
    ["reasoning_effort", "Effort", "choice",
      { choices: ["minimal", "low", "medium", "high", "xhigh", "max", "ultra"] }],
  ]],
];

export class Params {
  constructor(form, onKey) {
    this.form = form;
    this.fields = new Map();
    for (const [title, fields] of GROUPS) {
      const rows = fields.map((field) => this.#row(...field));
      if (title) form.append(el("details", {}, el("summary", {}, title), ...rows));
      else form.append(...rows);
    }
    const key = el("input", { type: "password", id: "p-key", autocomplete: "off" });
    if (hasKey()) key.placeholder = "set for this tab";
    key.addEventListener("change", () => { setKey(key.value); onKey(); });
    form.append(el("details", { id: "access" }, el("summary", {}, "Access"),
      el("label.field", { for: "p-key" }, el("span", {}, "API key"), key)));
    form.append(el("p.row", {}, el("button.quiet", { type: "reset" }, "Back to the defaults")));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", (event) => this.#keep(event.target));
    form.addEventListener("reset", () => setTimeout(() => this.#keep(null)));
    this.#recall();
  }

  #row(name, label, kind, options) {
    const id = `p-${name}`;
    let input;
    if (kind === "choice") {
      input = el("select", { id }, el("option", { value: "" }, "default"),
        ...options.choices.map((choice) => el("option", { value: choice }, choice)));
    } else if (kind === "lines") {
      input = el("textarea", { id, rows: options.rows ?? 2, placeholder: options.hint, spellcheck: "false" });
    } else if (kind === "flag") {
      input = el("input", { id, type: "checkbox", checked: options.on });
    } else {
      const { min, max, step, usual } = options;
      input = el("input", { id, type: "number", min, max, step, placeholder: usual, inputmode: "decimal" });
    }
    this.fields.set(name, { input, kind });
    return el(`label.field.${kind}`, { for: id }, el("span", {}, label), input);
  }

  // Shows what the server does by itself.
  defaults(models) {
    const { input } = this.fields.get("model");
    const chosen = input.value || read("localStorage", STORE).model; // which is kept until its name is known
    input.replaceChildren(el("option", { value: "" }, models[0].id),
      ...models.slice(1).map((model) => el("option", { value: model.id }, model.id)));
    input.value = chosen ?? "";
    if (input.selectedIndex < 0) input.value = "";
    input.closest(".field").hidden = models.length < 2;
    for (const [name, value] of Object.entries(models[0].sampling_defaults ?? {})) {
      const field = this.fields.get(name);
      if (field) field.input.placeholder = String(value);
    }
    const { drafts, rule } = models[0].speculation ?? {};
    if (drafts !== undefined) this.fields.get("drafts").input.placeholder = `up to ${drafts}`;
    if (rule) this.fields.get("rule").input.options[0].textContent = `${rule} (default)`;
  }

  // Keeps one field, so that what other tabs have changed is not undone; null: all of them.
  #keep(changed) {
    const values = changed ? read("localStorage", STORE) : {};
    for (const [name, { input, kind }] of this.fields) {
      if (!changed || input === changed) values[name] = kind === "flag" ? input.checked : input.value;
    }
    write("localStorage", STORE, values);
  }

  #recall() {
    const values = read("localStorage", STORE);
    for (const [name, { input, kind }] of this.fields) {
      if (!(name in values)) continue;
      if (kind === "flag") input.checked = values[name];
      else input.value = values[name];
    }
  }

  #text(name) {
    return this.fields.get(name).input.value;
  }

  // An Error for what a field holds, with the `input`, which can be seen from now on.
  #wrong(name, what) {
    const { input } = this.fields.get(name);
    input.setAttribute("aria-invalid", "true");
    const group = input.closest("details");
    if (group) group.open = true;
    return Object.assign(new Error(`${input.labels[0].firstChild.textContent}: ${what}`), { input });
  }

  // The fields of a request body. Throws an Error that says which field is wrong.
  body() {
    const body = {};
    const speculation = { report: true, steps: this.fields.get("steps").input.checked };
    for (const { input } of this.fields.values()) input.removeAttribute("aria-invalid");
    for (const [name, { input, kind }] of this.fields) {
      if (kind !== "number") continue;
      const { badInput, rangeOverflow, rangeUnderflow, stepMismatch } = input.validity;
      // A step of less than 1 is for the arrow keys; any value between is fine.
      const bad = badInput || rangeOverflow || rangeUnderflow || (stepMismatch && input.step === "1");
      if (bad) throw this.#wrong(name, input.validationMessage);
      if (!input.value) continue;
      // 64-bit seeds do not fit a double.
      if (name === "seed" && !Number.isSafeInteger(Number(input.value))) {
        throw this.#wrong(name, `at most ${Number.MAX_SAFE_INTEGER} here`);
      }
      if (name === "drafts") speculation.drafts = Number(input.value);
      else body[name] = Number(input.value);
    }
    for (const name of ["model", "reasoning_effort"]) if (this.#text(name)) body[name] = this.#text(name);
    if (this.#text("rule")) speculation.rule = this.#text("rule");
    const lines = (name) => this.#text(name).split("\n").filter((line) => line !== "");
    if (lines("stop").length) body.stop = lines("stop");
    const ids = this.#text("stop_token_ids").split(/[\s,]+/).filter(Boolean);
    if (ids.some((id) => !/^\d+$/.test(id))) throw this.#wrong("stop_token_ids", "numbers, please");
    if (ids.length) body.stop_token_ids = ids.map(Number);
    const bias = {};
    for (const line of lines("logit_bias")) {
      const found = /^\s*(\d+)\s*:\s*(-?\d+(?:\.\d+)?)\s*$/.exec(line);
      if (!found) throw this.#wrong("logit_bias", `"${line}" is not of the form 123: -5`);
      bias[found[1]] = Number(found[2]);
    }
    if (Object.keys(bias).length) body.logit_bias = bias;
    if (this.fields.get("ignore_eos").input.checked) body.ignore_eos = true;
    return { ...body, speculation };
  }

  get system() {
    return this.#text("system").trim();
  }
}
