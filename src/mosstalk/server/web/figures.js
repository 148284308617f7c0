// The time to the answer: one number, and behind a fold its parts over the last turns.

import { put } from "./words.js";

const MOST_ROWS = 50;
const MOST_BARS = 20;
/** The parts of a bar, from the bottom up, as `Turn.parts` and the style sheet call them. */
const PARTS = ["wait", "server", "output", "rest"];
const WIDE = 640;
const TALL = 150;
const LEFT = 56;
const BASE = 24;
const SVG = "http://www.w3.org/2000/svg";

/** @param {number | null | undefined} ms */
const whole = (ms) => (ms == null ? "–" : String(Math.round(ms)));

function draw(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

export class Figures {
  /**
   * @param {HTMLTableSectionElement} body @param {HTMLOutputElement} latest
   * @param {HTMLElement} latestOf what the latest figure is of @param {HTMLElement} plot
   */
  constructor(body, latest, latestOf, plot) {
    this.body = body;
    this.latest = latest;
    this.latestOf = latestOf;
    this.plot = plot;
    this.clear();
  }

  clear() {
    /** @type {Map<number, import("./turn.js").Turn>} in their order */
    this.turns = new Map();
    /** @type {Map<number, HTMLTableRowElement>} */
    this.rows = new Map();
    this.newest = 0;
    this.body.replaceChildren();
    this.plot.replaceChildren();
    this.plot.hidden = true;
    this.latest.textContent = "–";
    put(this.latestOf, "no-turn");
  }

  /** @param {import("./turn.js").Turn} turn */
  put(turn) {
    this.turns.set(turn.number, turn);
    if (this.turns.size > MOST_ROWS) this.turns.delete(this.turns.keys().next().value);
    const cells = [String(turn.number), ...[turn.answerMs, ...parts(turn)].map(whole)];
    const row = this.rows.get(turn.number) ?? this.begin(turn.number, cells.length);
    cells.forEach((text, place) => (row.cells[place].textContent = text));
    if (turn.answerMs === undefined) return;
    this.drawPlot();
    if (turn.number < this.newest) return;
    this.newest = turn.number;
    this.latest.textContent = `${whole(turn.answerMs)} ms`;
    const from = turn.soundAt === undefined ? "from-text" : `from-${turn.kind}`;
    put(this.latestOf, from, { turn: turn.number, wait: whole(turn.waitMs) });
  }

  begin(number, width) {
    const row = this.body.insertRow(0);
    for (let place = 0; place < width; place++) row.insertCell();
    this.rows.set(number, row);
    if (this.body.rows.length > MOST_ROWS) this.body.deleteRow(-1);
    return row;
  }

  /** A bar for each of the last answers. */
  drawPlot() {
    const shown = [...this.turns.values()].filter((turn) => turn.answerMs > 0).slice(-MOST_BARS);
    const step = scaleOf(Math.max(...shown.map((turn) => turn.answerMs)));
    const most = step * Math.ceil(Math.max(...shown.map((turn) => turn.answerMs)) / step);
    const height = TALL - BASE - 12;
    const tall = (ms) => (height * ms) / most;
    const picture = draw("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "img" });
    put(picture, "plot", undefined, "sayLabel");
    for (let ms = 0; ms <= most; ms += step) {
      const y = TALL - BASE - tall(ms);
      picture.append(draw("line", { x1: LEFT, x2: WIDE, y1: y, y2: y }));
      picture.append(draw("text", { x: LEFT - 6, y: y + 4, class: "scale" }, String(ms)));
    }
    const wide = (WIDE - LEFT) / Math.max(shown.length, 8);
    shown.forEach((turn, place) => {
      const x = LEFT + (place + 0.15) * wide;
      let y = TALL - BASE;
      for (const [name, ms] of barOf(turn)) {
        y -= tall(ms);
        const bar = { x, y, width: 0.7 * wide, height: tall(ms), class: name };
        picture.append(draw("rect", bar));
      }
      const middle = { x: LEFT + (place + 0.5) * wide, y: TALL - 8, class: "turn" };
      picture.append(draw("text", middle, String(turn.number)));
    });
    this.plot.replaceChildren(picture);
    this.plot.hidden = false;
  }

  /** For a file: what was measured of each turn. */
  json() {
    return [...this.turns.values()].map((turn) => ({
      turn: turn.number,
      kind: turn.kind,
      answer_ms: turn.answerMs ?? null,
      parts_ms: turn.parts,
      status: turn.status,
      gaps: turn.gaps,
      server: turn.server,
    }));
  }
}

const parts = (turn) => PARTS.map((name) => turn.parts[name]);

/** The parts that are known; until the server has told its own, the whole is the rest. */
function barOf(turn) {
  const known = turn.parts;
  if (known.rest === undefined) return [["rest", turn.answerMs]];
  return PARTS.filter((name) => known[name] > 0).map((name) => [name, known[name]]);
}

/** A step of 1, 2 or 5 times a power of ten that gives a scale two to five lines. */
function scaleOf(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [power / 5, power / 2, power, 2 * power].find((step) => most / step <= 5);
}
