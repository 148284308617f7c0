// The conversation in words: one line a turn, spoken ones with how long they were.

const NAMES = { you: "You", reply: "Reply", page: "" };

export class Log {
  /** @type {Map<string, HTMLLIElement>} */
  lines = new Map();

  /** @param {HTMLElement} list @param {HTMLElement} readOut where a screen reader listens */
  constructor(list, readOut) {
    this.list = list;
    this.readOut = readOut;
  }

  /**
   * Add to a line of the conversation, or begin it.
   * @param {{id: string, who: string, text?: string, more?: string, note?: string, done?: boolean}} entry
   */
  put({ id, who, text, more, note, done }) {
    const line = this.lines.get(id) ?? this.begin(id, who);
    const words = line.querySelector(".text");
    if (text !== undefined) words.textContent = text;
    if (more) words.textContent += more;
    const said = line.querySelector(".note");
    if (note !== undefined) said.textContent = note;
    said.hidden = !said.textContent;
    line.hidden = !line.querySelector(".text").textContent && said.hidden;
    if (more || note || text) this.list.scrollTop = this.list.scrollHeight;
    // Whole replies alone: word by word they would be read out as scraps.
    if (done && who === "reply" && words.textContent) this.readOut.textContent = words.textContent;
  }

  /** A line of the page's own. @param {string} text */
  say(text) {
    this.put({ id: `page-${this.lines.size}`, who: "page", text });
  }

  begin(id, who) {
    const line = document.createElement("li");
    line.dataset.who = who;
    for (const part of ["who", "text", "note"]) {
      const span = document.createElement("span");
      span.className = part === "note" ? "note quiet" : part;
      line.append(span);
    }
    line.querySelector(".who").textContent = NAMES[who];
    this.list.append(line);
    this.lines.set(id, line);
    return line;
  }
}
