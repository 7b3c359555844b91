// Runs the HTML of an answer in a frame with an origin of its own and no network.

import { button, el } from "./dom.js";

const RELOAD_MS = 300; // less lies between two loads only where a page loads itself in a loop

// `source`: gives the HTML. `back`: called when the preview is closed.
export function openPreview(source, back) {
  const holder = el("div.stage");
  const panel = el("section.preview", { "aria-label": "Preview" });

  function load() {
    const frame = el("iframe", {
      // No allow-same-origin: the origin is opaque, and the page out of reach.
      sandbox: "allow-scripts",
      src: "page/preview.html",
      title: "Preview of the answer's page",
    });
    let last = -Infinity;
    // The frame's origin is opaque, so it has no name that a message could be addressed to; it can
    // only ever show documents of this server (frame-src), and nothing it says is listened to.
    frame.addEventListener("load", () => {
      // Also where a game starts over by loading itself anew, but not as fast as it can.
      const now = performance.now();
      if (now - last < RELOAD_MS) return;
      frame.contentWindow?.postMessage({ html: source() }, "*");
      if (last < 0) frame.focus();
      last = now;
    });
    holder.replaceChildren(frame);
  }

  const bar = el("div.code-bar", {}, el("span.lang", {}, "preview"));
  bar.append(
    button("Restart", load, { class: "quiet" }),
    button("Full screen", () => holder.requestFullscreen?.().catch(() => {}), { class: "quiet" }),
    button("Close", () => { panel.remove(); back(); }, { class: "quiet" }),
  );
  panel.append(bar, holder);
  load();
  return panel;
}
