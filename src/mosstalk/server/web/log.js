// The conversation in words: a bubble a turn, with its sound to play again and to save.

import { put } from "./words.js";

export class Log {
  /** @type {Map<string, HTMLLIElement>} */
  lines = new Map();

  /**
   * @param {HTMLElement} list @param {HTMLElement} readOut where a screen reader listens
   * @param {{play: (id: string) => void, save: (id: string) => void}} on what a bubble's buttons do
   */
  constructor(list, readOut, on) {
    this.list = list;
    this.readOut = readOut;
    this.on = on;
  }

  /**
   * Add to a line of the conversation, or begin it.
   * @param {{id: string, who: string, text?: string, more?: string, done?: boolean,
   *   note?: import("./words.js").Saying | null, sound?: Int16Array | null, heardMs?: number}} entry
   */
  put({ id, who, text, more, note, done, sound, heardMs }) {
    const line = this.lines.get(id) ?? this.begin(id, who);
    const said = line.querySelector(".text");
    if (text !== undefined) said.textContent = text;
    if (more) said.textContent += said.textContent ? more : more.trimStart();
    if (note) put(line.querySelector(".note"), ...note);
    line.querySelector(".note").hidden = !line.querySelector(".note").textContent;
    if (heardMs || (who === "you" && sound?.length)) line.querySelector(".again").hidden = false;
    line.hidden = !said.textContent && line.querySelector(".note").hidden;
    if (more || note || text) this.list.scrollTop = this.list.scrollHeight;
    // Whole replies alone: word by word they would be read out as scraps.
    if (done && who === "reply" && said.textContent) this.readOut.textContent = said.textContent;
  }

  /** A line of the page's own. @param {string} key */
  say(key) {
    this.put({ id: `page-${this.lines.size}`, who: "page" });
    const line = [...this.lines.values()].at(-1);
    put(line.querySelector(".text"), key);
    line.hidden = false;
  }

  /** The sound of a line is there no longer. @param {string} id */
  silence(id) {
    this.lines.get(id).querySelector(".again").hidden = true;
  }

  /** @param {string | null} id the line that is played again */
  playing(id) {
    for (const [each, line] of this.lines) {
      put(line.querySelector(".play"), each === id ? "stop-playing" : "play");
    }
  }

  clear() {
    this.lines.clear();
    this.list.replaceChildren();
    this.readOut.textContent = "";
  }

  begin(id, who) {
    const line = document.createElement("li");
    line.dataset.who = who;
    for (const part of ["who", "text", "note"]) {
      const span = document.createElement("span");
      span.className = part === "note" ? "note quiet" : part;
      line.append(span);
    }
    if (who !== "page") put(line.querySelector(".who"), who);
    line.append(this.again(id));
    this.list.append(line);
    this.lines.set(id, line);
    return line;
  }

  /** Buttons for the sound of a line, hidden until there is some. */
  again(id) {
    const buttons = document.createElement("span");
    buttons.className = "again";
    buttons.hidden = true;
    for (const what of ["play", "save"]) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = what;
      put(button, what);
      button.addEventListener("click", () => this.on[what](id));
      buttons.append(button);
    }
    return buttons;
  }
}
