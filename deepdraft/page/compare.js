// One question answered twice, plainly and with drafts: are the tokens the same, what time is won.

import { el, num, seconds } from "./dom.js";
import { Answer, toBottom } from "./answer.js";

export class Comparison {
  constructor(actions) {
    this.plain = new Answer({ ...actions, retry: null }, "Plain");
    this.drafted = new Answer({ ...actions, retry: null }, "With drafts");
    this.verdict = el("div.verdict", { role: "status" });
    this.node = el("div.versus", {}, this.verdict,
      el("div.columns", {}, this.plain.node, this.drafted.node));
    this.retry = actions.retry;
  }

  // One after the other: together they would share steps and cores. `ask(answer, body)` runs one.
  async run(body, ask) {
    this.plain.wait.lastChild.textContent = "waiting for its turn";
    this.#state("First with drafts, then plainly, with the same seed.");
    const speculation = { ...body.speculation, rule: "coupled", steps: true };
    const most = speculation.drafts;
    delete speculation.drafts;
    const drafted = most > 0 ? { ...speculation, drafts: most } : speculation;
    if (!(await ask(this.drafted, { ...body, speculation: drafted }))) return false;
    this.plain.times.begin = performance.now();
    if (!(await ask(this.plain, { ...body, speculation: { ...speculation, drafts: 0 } }))) return false;
    this.#judge();
    return true;
  }

  #state(text) {
    this.verdict.replaceChildren(el("p", {}, text));
  }

  #judge() {
    const [a, b] = [this.plain.ids, this.drafted.ids];
    let same = 0;
    while (same < a.length && a[same] === b[same]) same++;
    const equal = same === a.length && same === b.length;
    const time = (answer) => answer.times.end - answer.times.first;
    const [slow, fast] = [time(this.plain), time(this.drafted)];
    const most = Math.max(slow, fast);
    const timed = Math.min(a.length, b.length) > 1 && slow > 0 && fast > 0;
    const bar = (name, ms, kind) => el("div.lane", {},
      el("span.lane-name", {}, name),
      meter(ms / most, kind),
      el("span.lane-value", {}, seconds(ms)));
    this.verdict.dataset.equal = String(equal);
    this.verdict.dataset.same = String(same);
    this.verdict.replaceChildren(
      el("p.verdict-line", {},
        el("strong", {}, equal
          ? same === 1 ? "The same token" : `The same ${num(same)} tokens`
          : `Different from token ${num(same + 1)} on`),
        // One token, or none, has no time from the first to the last.
        timed
          ? `, ${num(slow / fast, 2)} times as fast: ${seconds(Math.abs(slow - fast))} `
            + (slow >= fast ? "won" : "lost") + " from the first token to the last."
          : ", too few for a time."),
      ...(timed ? [bar("Plain", slow, "plain"), bar("With drafts", fast, "accepted")] : []),
    );
    toBottom();
  }
}

// A bar as an SVG, whose width is an attribute and so needs no inline style.
function meter(share, kind) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("class", "lane-bar");
  svg.setAttribute("aria-hidden", "true");
  const rect = document.createElementNS(ns, "rect");
  rect.setAttribute("class", kind);
  rect.setAttribute("height", "100%");
  rect.setAttribute("width", `${Math.max(0.5, 100 * share)}%`);
  rect.setAttribute("rx", "2");
  svg.append(rect);
  return svg;
}
