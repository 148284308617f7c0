// The latency read-out: a row a turn, and the latest of them in large.

const KINDS = { held: "pressed", "hands-free": "hands-free", typed: "typed", unasked: "unasked" };
const FROM = {
  held: "from letting go to the first sound heard",
  "hands-free": "from your last sound to the first sound heard",
  typed: "from sending to the first sound heard",
  unasked: "",
};
const MOST_ROWS = 50;

/** @param {number | null | undefined} ms */
const whole = (ms) => (ms == null ? "–" : String(Math.round(ms)));

export class Figures {
  /** @type {Map<number, HTMLTableRowElement>} */
  rows = new Map();

  /**
   * @param {HTMLTableSectionElement} body @param {HTMLOutputElement} latest
   * @param {HTMLElement} latestOf what the latest figure is of
   */
  constructor(body, latest, latestOf) {
    this.body = body;
    this.latest = latest;
    this.latestOf = latestOf;
  }

  /** @param {import("./turn.js").Turn} turn @param {number} outputMs */
  put(turn, outputMs) {
    const cells = this.cells(turn, outputMs);
    const row = this.rows.get(turn.number) ?? this.begin(turn.number, cells.length);
    cells.forEach((text, place) => (row.cells[place].textContent = text));
    if (turn.answerMs === undefined || turn.number < this.newest) return;
    this.newest = turn.number;
    this.latest.textContent = `${whole(turn.answerMs)} ms`;
    const from = turn.soundAt === undefined ? "to the first text" : FROM[turn.kind];
    const wait = turn.waitMs == null ? "" : `; ${whole(turn.waitMs)} ms of it waiting for a pause`;
    this.latestOf.textContent = `turn ${turn.number}: ${from}${wait}`;
  }

  newest = 0;

  /** @param {import("./turn.js").Turn} turn */
  cells(turn, outputMs) {
    const { server } = turn;
    return [
      String(turn.number),
      KINDS[turn.kind],
      whole(turn.answerMs),
      whole(turn.waitMs),
      turn.soundAt === undefined ? "–" : whole(outputMs),
      whole(server.commit_to_first_audio_ms ?? server.commit_to_first_text_ms),
      server.real_time_factor == null ? "–" : server.real_time_factor.toFixed(3),
      turn.note || "–",
      String(turn.gaps),
      turn.status,
    ];
  }

  begin(number, width) {
    const row = this.body.insertRow(0);
    for (let place = 0; place < width; place++) row.insertCell();
    this.rows.set(number, row);
    if (this.body.rows.length > MOST_ROWS) this.body.deleteRow(-1);
    return row;
  }
}
