// What is seen of the state of things: the line above the buttons, the buttons, the notice.

import { put } from "./words.js";

/** What the page is without a session. */
const CONNECTION = { off: "off", connecting: "connecting", waiting: "off", key: "key-needed" };
const QUESTIONS = {
  pocket: ["What is the capital of France?", "What is seven plus five?", "Tell me a joke."],
  synthetic: [],
  other: ["Tell me a short story.", "Why is the sky blue?", "你好，请介绍一下你自己。"],
};
const WITHHELD = { NotAllowedError: "denied", NotFoundError: "missing", NotReadableError: "busy" };
/** Whether there are keys to speak of, as style.css has it for `.keys`: a phone has none. */
const keys = matchMedia("(hover: hover) and (pointer: fine) and (min-width: 30rem)");

/**
 * What is known of the microphone: not asked for yet, on, being asked for, or why there is none.
 * @typedef {{state: "unasked" | "on" | "asking" | "denied" | "missing" | "busy" | "unusable" |
 *   "lost" | "insecure", values?: Record<string, unknown>}} Microphone
 */

/** Why a microphone was withheld. @param {DOMException} error @returns {Microphone} */
export const withheld = ({ name, message }) =>
  name in WITHHELD ? { state: WITHHELD[name] } : { state: "unusable", values: { message } };

/** A browser gives neither microphone nor audio thread to a page that came by plain http. */
export const insecure = () => ({
  state: /** @type {const} */ ("insecure"),
  values: { port: location.port || 80, host: location.hostname },
});

export class Stage {
  /** @param {(id: string) => any} by an element by its id */
  constructor(by) {
    this.by = by;
  }

  /** @param {import("./words.js").Saying | null} saying @param {boolean} [reconnect] */
  notice(saying, reconnect = false) {
    if (saying) put(this.by("notice-text"), ...saying);
    this.by("notice").hidden = !saying;
    this.by("reconnect").hidden = !reconnect;
  }

  /** Say in the notice what to do about the microphone. @param {Microphone} microphone */
  explain({ state, values }) {
    this.notice(["microphone", { state: [state], todo: [`${state}-todo`, values] }]);
  }

  /**
   * Everything that follows from the state of things.
   * @param {{started: boolean, wire: import("./wire.js").Wire, talk: import("./talk.js").Talk,
   *   microphone: Microphone, handsFree: boolean}} now
   */
  show(now) {
    const { wire, talk, microphone, handsFree } = now;
    const mode = handsFree ? "hands-free" : "held";
    put(this.by("status"), ...this.status(now, mode));
    const hint = this.by("hint");
    hint.hidden = !["on", "unasked"].includes(microphone.state);
    const only = document.querySelector("input[value=hands-free]").disabled;
    put(hint, only ? "no-detector" : `hint-${mode}${keys.matches ? "-keys" : ""}`);
    this.by("interrupt").disabled = !talk.interruptible;
    this.by("key-form").hidden = wire.state !== "key";
    const asking = microphone.state === "asking" && talk.status === "waiting";
    const status = asking ? "asking" : talk.status;
    document.documentElement.dataset.status = wire.state === "open" ? status : wire.state;
    this.showPress(now);
  }

  /** @returns {import("./words.js").Saying} */
  status({ started, wire, talk, microphone, handsFree }, mode) {
    const without = !["on", "unasked"].includes(microphone.state);
    const why = /** @type {const} */ (["microphone-state", { state: [microphone.state] }]);
    if (wire.state !== "open") return !started && without ? why : [CONNECTION[wire.state]];
    if (talk.status === "off") return ["connecting"];
    if (talk.status === "thinking") return ["thinking"];
    if (talk.status !== "waiting") return [`${talk.status}-${mode}`];
    if (without) return why;
    if (microphone.state === "unasked") return ["ready-written"];
    return handsFree && talk.muted ? ["ready-muted"] : [`ready-${mode}`];
  }

  /** The big button. */
  showPress({ talk, microphone, handsFree }) {
    const button = this.by("press");
    const on = microphone.state === "on";
    const mute = on && handsFree && !talk.muted;
    const held = talk.held ? "let-go" : "held";
    put(button, on && !handsFree ? held : mute ? "mute" : "talk");
    button.disabled = microphone.state === "asking" || (on && !handsFree && !talk.ready);
    button.toggleAttribute("data-on", Boolean(talk.held));
    button.toggleAttribute("data-listens", mute);
  }

  /** What the served model can do, and what to ask it. @param {{id: string, weights?: string}} model */
  introduce(model, ask) {
    const { id, weights } = model;
    this.by("model").textContent = id + (weights ? ` · ${weights}` : "");
    if (!weights) return;
    const kind = weights in QUESTIONS ? weights : "other";
    put(this.by("can"), `can-${kind}`);
    const buttons = QUESTIONS[kind].map((question) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = question;
      button.lang = /[a-z]/.test(question) ? "en" : "zh-CN";
      button.addEventListener("click", ({ timeStamp }) => ask(question, timeStamp));
      item.append(button);
      return item;
    });
    this.by("questions").replaceChildren(...buttons);
    this.by("intro").hidden = false;
  }
}
