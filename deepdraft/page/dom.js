// Small helpers for building the document. Text only ever becomes text nodes.

export const $ = (id) => document.getElementById(id);

// An element: el("p.note", {title: "x"}, "text", child). Null children are left out.
export function el(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export const clear = (node) => node.replaceChildren();

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

// 1234.5 -> "1,235"; small numbers keep as many digits as say something.
export function num(value, digits = 0) {
  if (value == null || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const seconds = (ms) => (ms < 10000 ? num(ms / 1000, 2) : num(ms / 1000, 1)) + " s";

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (value >= 1000 && i < units.length - 1) { value /= 1000; i++; }
  return num(value, value < 10 && i > 1 ? 1 : 0) + " " + units[i];
}

const SIGNS = { " ": "·", "\n": "↵", "\t": "⇥" };

// White space and what else has no sign made visible, for texts of single tokens.
export function shown(text) {
  const code = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return text.replace(/[\p{C}\p{Z}]/gu, (c) => SIGNS[c] ?? code(c)) || "(part of a character)";
}

export async function copy(text, say) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch {
    say("The browser did not allow copying");
  }
}
