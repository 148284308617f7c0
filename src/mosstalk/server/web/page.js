// The page: who is told what. Sound is in sound.js, the protocol in talk.js, the socket in wire.js.

import { Choices } from "./choices.js";
import { Figures } from "./figures.js";
import { Log } from "./log.js";
import { holdToTalk } from "./press.js";
import { debugOptions, probe } from "./probe.js";
import { Sound } from "./sound.js";
import { Talk } from "./talk.js";
import { drawWaves } from "./waves.js";
import { key, Wire } from "./wire.js";
import { CONNECTION, GREETING, HINT, INSECURE, LOST, STATUS, withheld } from "./words.js";

/** @param {string} id @returns {any} */
const by = (id) => document.getElementById(id);

const DARK = { "": "(prefers-color-scheme: dark)", dark: "all", light: "not all" };
const debug = debugOptions();
const wire = new Wire();
const sound = new Sound();
const talk = new Talk(wire, sound);
const choices = new Choices(by("settings"), by("voices"));
const log = new Log(by("log"), by("read-out"));
const figures = new Figures(by("turns"), by("latest"), by("latest-of"));
if (debug) probe(wire, sound, talk);

let started = false;
/** The browser asks for the microphone, or opens it. */
let asking = false;
let sessions = 0;
/** What the served model says of itself before anything else was said. */
let greeting = "";
/** Written before there was a session. */
let unsent = "";

// Starting.

/** Open what is to be opened; a click or a key must have come before. */
async function start(microphone) {
  if (!started) {
    started = true;
    show();
    if (isSecureContext) await sound.open(debug ?? { tap: false, loop: false });
    else writeOnly();
    wire.connect();
  }
  if (microphone && sound.context) await openMicrophone();
  else show();
}

/** No sound can be had here: not from a microphone, and not from a reply. */
function writeOnly() {
  by("settings").elements.reply.value = "text";
  by("settings").elements.reply.disabled = true;
  notice(INSECURE);
  configure();
}

async function openMicrophone() {
  asking = !sound.stream;
  show();
  try {
    await sound.listen(choices.echoCancellation);
    notice("");
  } catch (error) {
    notice(withheld(error));
  }
  asking = false;
  show();
}

const handsFree = () => document.querySelector("input[name=turns]:checked").value === "hands-free";

/** Tell the server what was chosen. */
function configure() {
  talk.configure(choices.session(handsFree()));
}

// What the page shows.

/** @param {string} text empty: nothing to say @param {boolean} [reconnect] */
function notice(text, reconnect = false) {
  by("notice-text").textContent = text;
  by("notice").hidden = !text;
  by("reconnect").hidden = !reconnect;
}

/** Everything that follows from the state of things. */
function show() {
  const mode = handsFree() ? "hands-free" : "held";
  const status = asking && talk.status === "waiting" ? "asking" : talk.status;
  const said = wire.state === "open" ? STATUS[mode][status] : CONNECTION[started ? wire.state : "off"];
  if (by("status").textContent !== said) by("status").textContent = said;
  by("hint").textContent = isSecureContext ? HINT[mode] : "";
  by("interrupt").disabled = !talk.interruptible;
  by("key-form").hidden = wire.state !== "key";
  document.documentElement.dataset.status = wire.state === "open" ? status : wire.state;
  showPress(mode);
}

/** The big button. */
function showPress(mode) {
  const button = by("press");
  const free = mode === "hands-free";
  const [text, usable] = !started
    ? ["Start", true]
    : !sound.context
      ? ["No microphone here", false]
      : !sound.stream
        ? [asking ? "Opening the microphone" : "Try the microphone again", !asking]
        : free
          ? [talk.muted ? "Unmute the microphone" : "Mute the microphone", true]
          : [talk.held ? "Let go to send" : "Hold to talk", talk.ready];
  if (button.textContent !== text) button.textContent = text;
  button.disabled = !usable;
  button.toggleAttribute("data-on", Boolean(talk.held) || (free && talk.muted && talk.ready));
}

// What the user does.

const holding = () => started && Boolean(sound.stream) && talk.ready && !handsFree();

holdToTalk(by("press"), {
  active: holding,
  on: () => Boolean(talk.held),
  down: () => talk.press(),
  up: (at) => talk.release(at),
});

by("press").addEventListener("click", () => {
  if (!started || !sound.stream) start(true);
  else if (handsFree()) talk.mute(!talk.muted);
});

// A phone takes the sound away for a call, and gives it back only when asked by a touch.
addEventListener("pointerdown", () => sound.wake());
addEventListener("keydown", () => sound.wake());
by("interrupt").addEventListener("click", () => talk.interrupt());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (talk.held) talk.discard();
  else if (talk.interruptible) talk.interrupt();
});

by("typed").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("text").value.trim();
  if (!text) return;
  by("text").value = "";
  if (talk.ready) talk.say(text, event.timeStamp);
  else unsent = text;
  if (!started) start(false);
});
by("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  by("typed").requestSubmit();
});

for (const radio of document.querySelectorAll("input[name=turns]")) {
  radio.addEventListener("change", () => {
    talk.turnBy(handsFree());
    configure();
  });
}
by("settings").addEventListener("submit", (event) => event.preventDefault());
by("settings").addEventListener("change", ({ target }) => {
  if (target.name !== "echo") configure();
  else if (sound.stream) openMicrophone();
});
by("theme").addEventListener("change", ({ target }) => (by("dark").media = DARK[target.value]));

by("reconnect").addEventListener("click", () => wire.connect());
by("dismiss").addEventListener("click", () => notice(""));
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(by("key").value);
  by("key").value = "";
  wire.connect();
});

// What happens.

wire.addEventListener("state", ({ detail: { state, why, seconds } }) => {
  if (state !== "open") talk.lost();
  const again = seconds ? ` Trying again in ${Math.ceil(seconds)} s.` : "";
  if (why) notice(why + again, state !== "key");
  else if (state === "open" && !by("reconnect").hidden) notice("");
  show();
  if (state === "key") by("key").focus();
});
wire.addEventListener("models", ({ detail }) => {
  const [model] = detail.data ?? [];
  by("model").textContent = model ? model.id + (model.weights ? `, ${model.weights} weights` : "") : "";
  if (model?.voices) choices.offer(model.voices);
  greeting = GREETING[model?.weights] ?? "";
});
sound.addEventListener("lost", () => {
  sound.stream = null;
  notice(LOST);
  show();
});
talk.addEventListener("change", show);
talk.addEventListener("notice", ({ detail }) => notice(detail.text));
talk.addEventListener("entry", ({ detail }) => log.put(detail));
talk.addEventListener("turn", ({ detail }) => figures.put(detail.turn, sound.clock?.outputMs));
talk.addEventListener("settled", ({ detail: { session, first } }) => {
  if (first && sessions++) log.say("A new session: the server knows nothing of what was said before.");
  else if (first && greeting) log.say(greeting);
  const warnings = choices.show(session);
  if (!first && warnings.length) notice(`The server says: ${warnings.join("; ")}.`);
  if (first || !unsent) return;
  talk.say(unsent, performance.now());
  unsent = "";
});

configure();
show();
drawWaves(by("wave-you"), by("wave-reply"), sound);
