// Plays the app pages without a browser: `node training/data/check_apps.mjs FILE.html...`
// A tiny document and canvas stand in for the browser; each known app is driven by events and its
// visible result is checked. Exit status 1 and a message at the first failure.
import { readFileSync } from "node:fs";
import { basename } from "node:path";
import vm from "node:vm";

function element(tag) {
  const node = {
    tag, textContent: "", value: "", children: [], classes: new Set(), width: 0, height: 0,
    appendChild(child) { node.children.push(child); return child; },
    remove() { node.removed = true; },
    classList: { toggle: c => node.classes.has(c) ? node.classes.delete(c) : node.classes.add(c) },
    getContext: () => node.context,
    set innerHTML(text) { node.children = []; },
  };
  node.context = {
    boxes: [], fillStyle: "",
    clearRect() { node.context.boxes = []; },
    fillRect(x, y, w, h) {
      if (![x, y, w, h].every(Number.isFinite)) throw new Error("fillRect with a non-number");
      node.context.boxes.push([x, y, w, h, node.context.fillStyle]);
    },
    fillText() {},
  };
  return node;
}

function load(file, random) {
  const html = readFileSync(file, "utf8");
  const script = html.match(/<script>\n([^]*?)<\/script>/)[1];
  const byId = {};
  for (const [, tag, id] of html.matchAll(/<(\w+)[^>]*? id="(\w+)"/g)) byId[id] = element(tag);
  for (const [, id, text] of html.matchAll(/ id="(\w+)"[^>]*>([^<]*)</g)) byId[id].textContent = text;
  const timers = [];
  const state = { now: 1000, byId, timers, heading: element("h1") };
  const document = {
    getElementById: id => byId[id] ?? null, createElement: element,
    querySelector: () => state.heading,
  };
  const sandboxMath = {};
  for (const name of Object.getOwnPropertyNames(Math)) sandboxMath[name] = Math[name];
  sandboxMath.random = random ?? Math.random;
  class FakeDate extends Date { static now() { return state.now; } }
  const context = vm.createContext({
    document, Math: sandboxMath, Date: FakeDate, console,
    setInterval: run => timers.push(run), setTimeout: run => run(), clearInterval: () => {},
  });
  vm.runInContext(script, context);
  state.tick = (n = 1) => { for (let i = 0; i < n; i++) for (const run of timers) run(); };
  state.key = key => document.onkeydown({ key, preventDefault() {} });
  state.up = key => document.onkeyup({ key });
  state.eval = code => vm.runInContext(code, context);
  return state;
}

function check(ok, what) {
  if (!ok) throw new Error(what);
}

const plays = {
  tetris(file) {
    const values = [];
    let page = load(file, () => (values.length ? values.shift() : 1.5 / 7)); // only squares
    const cols = page.eval("cols"), rows = page.eval("rows");
    const drawn = () => page.byId.game.context.boxes.length;
    for (let at = 0; at + 1 < cols; at += 2) {
      for (let i = 0; i < cols; i++) page.key("ArrowLeft");
      for (let i = 0; i < at; i++) page.key("ArrowRight");
      page.key(" ");
    }
    check(Number(page.byId.score.textContent) > 0, "two full rows of squares give no score");
    check(drawn() === 4, `rows were not cleared: ${drawn()} boxes left`);
    const before = page.eval("piece.y");
    page.tick();
    check(page.eval("piece.y") === before + 1, "the piece does not fall by itself");
    page.key("ArrowDown");
    check(page.eval("piece.y") === before + 2, "arrow down does not move the piece down");
    for (let i = 0; i < 60 * rows && !page.eval("over"); i++) page.tick();
    check(page.eval("over"), "the game does not end");
    check(/Enter/.test(page.byId.note.textContent), "no hint how to restart");
    page.key("Enter");
    check(!page.eval("over") && page.byId.score.textContent == 0, "Enter does not restart");
    page.tick(3);
    page = load(file, () => 5.5 / 7); // turning
    page.tick();
    const shape = JSON.stringify(page.eval("piece.cells"));
    const seen = new Set([shape]);
    for (let i = 0; i < 4; i++) { page.key("ArrowUp"); seen.add(JSON.stringify(page.eval("piece.cells"))); }
    check(seen.size === 4 && JSON.stringify(page.eval("piece.cells")) === shape, "turning is wrong");
    let seed = 7; // long random play
    page = load(file, () => (seed = (seed * 16807) % 2147483647) / 2147483647);
    const kinds = new Set();
    const keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", " ", "Enter", "x"];
    for (let i = 0; i < 4000; i++) {
      page.key(keys[(i * 7 + (i >> 3)) % keys.length]);
      kinds.add(page.eval("piece.color"));
      check(page.eval("grid.length") === rows, "the board changed its size");
      check(page.eval("grid.every(r => r.length === cols)"), "a row changed its size");
    }
    check(kinds.size === 7, `${kinds.size} kinds of pieces`);
  },
  snake(file) {
    let n = 0;
    const page = load(file, () => (n++ < 2 ? 0.55 : (n * 0.37) % 1)); // first food at 11, 11
    page.tick();
    check(page.eval("snake[0].x") === 11, "the snake does not move");
    page.key("ArrowDown");
    page.tick();
    check(page.byId.score.textContent == 1, "eating gives no score");
    page.tick(30);
    check(page.eval("over") && /Enter/.test(page.byId.note.textContent), "the wall does not end it");
    page.key("Enter");
    check(!page.eval("over"), "Enter does not restart");
  },
  pong(file) {
    const page = load(file);
    page.key("ArrowUp");
    page.tick(3000);
    page.up("ArrowUp");
    check(page.eval("scores[0] + scores[1]") > 0, "nobody scores");
    check(page.eval("player") === 0, "the paddle does not move");
  },
  breakout(file) {
    const page = load(file);
    page.tick(400);
    check(Number(page.byId.score.textContent) > 0 || page.eval("over"), "no brick is hit");
    page.tick(20000);
    check(page.eval("over"), "the game does not end");
    page.key("Enter");
    check(page.eval("over") === "" && page.eval("bricks.length") === 40, "Enter does not restart");
  },
  clock(file) {
    check(/^\d\d:\d\d:\d\d$/.test(load(file).byId.clock.textContent), "no time is shown");
  },
  calculator(file) {
    const page = load(file);
    const press = keys => [...keys].forEach(k => page.byId.keys.children.find(b => b.textContent === k).onclick());
    for (const [keys, shown] of [["12+30=", "42"], ["C7*8=", "56"], ["C9-4-3=", "2"], ["C8/0=", "Error"], ["C1+2+", "3"]]) {
      press(keys);
      check(page.byId.out.textContent === shown, `${keys} shows ${page.byId.out.textContent}`);
    }
  },
  todo(file) {
    const page = load(file);
    page.byId.text.value = " milk ";
    page.byId.add.onclick();
    page.byId.text.value = "bread";
    page.byId.text.onkeydown({ key: "Enter" });
    page.byId.add.onclick();
    const items = page.byId.list.children;
    check(items.length === 2 && items[0].textContent === "milk", "items are not added");
    items[0].onclick();
    check(items[0].classes.has("done"), "an item cannot be marked");
  },
  stopwatch(file) {
    const page = load(file);
    page.byId.toggle.onclick();
    page.now += 2500;
    page.tick();
    check(page.byId.time.textContent === "2.5", "running time is wrong");
    page.byId.toggle.onclick();
    page.now += 9000;
    page.byId.toggle.onclick();
    page.now += 500;
    page.tick();
    check(page.byId.time.textContent === "3.0", "time runs on while stopped");
    page.byId.reset.onclick();
    check(page.byId.time.textContent === "0.0", "reset does not work");
  },
  counter(file) {
    const page = load(file);
    page.eval("change(1); change(1); change(-1)");
    check(page.byId.count.textContent === 1, "counting is wrong");
    page.eval("change(-count)");
    check(page.byId.count.textContent === 0, "reset is wrong");
  },
  memory(file) {
    const page = load(file);
    const cards = page.byId.board.children;
    check(cards.length === 16, "not sixteen cards");
    for (let i = 0; i < 16; i++) for (let j = i + 1; j < 16; j++) { cards[i].onclick(); cards[j].onclick(); }
    check(page.heading.textContent === "You win!", "the game cannot be won");
  },
  guess(file) {
    const page = load(file, () => 0.5); // 51
    const say = n => { page.byId.guess.value = String(n); page.byId.try.onclick(); return page.byId.note.textContent; };
    check(say(10) === "Too low." && say(90) === "Too high." && say(51) === "Correct after 3 tries!", "hints are wrong");
  },
  tictactoe(file) {
    const page = load(file);
    for (const i of [0, 3, 1, 4, 2]) page.byId.board.children[i].onclick();
    check(page.byId.note.textContent === "X wins!", "three in a row do not win");
    page.eval("start()");
    for (const i of [0, 1, 2, 4, 3, 5, 7, 6, 8]) page.byId.board.children[i].onclick();
    check(page.byId.note.textContent === "Draw!", "a full board is no draw");
  },
};

let failed = 0;
for (const file of process.argv.slice(2)) {
  const app = basename(file).split(/[.-]/)[0];
  try {
    check(plays[app], "unknown app");
    plays[app](file);
    console.log(`ok ${basename(file)}`);
  } catch (error) {
    failed = 1;
    console.log(`FAILED ${basename(file)}: ${error.message}`);
  }
}
process.exit(failed);
