// The WebSocket to the page's own origin: key, reasons for a refusal, and coming back.

const KEY_NAME = "mosstalk-key";
const WAITS_S = [1, 2, 4, 8, 15, 30];
/** Close codes of a session that has come to its end, and need not be taken up again. */
const ENDED = [1000, 1001];

/** @typedef {"off" | "connecting" | "open" | "waiting" | "key"} WireState */
/** @typedef {{data?: {id: string, voices?: (string | {id: string})[]}[]}} Models */

/** @typedef {import("./words.js").Saying} Saying */

/** The API key lives as long as the tab, and is sent to this page's own server alone. */
export const key = {
  get: () => sessionStorage.getItem(KEY_NAME) ?? "",
  /** @param {string} value */
  set: (value) => sessionStorage.setItem(KEY_NAME, value.trim()),
};

/** @param {string} path below the page's own folder */
const here = (path) => new URL(path, document.baseURI);

/** What carries the key over HTTP, if there is one. @returns {Record<string, string>} */
const headers = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

/**
 * Events: "state" {state, why, seconds}, where `why` is a Saying; "models" (what /v1/models said);
 * "message" (an event of the server).
 */
export class Wire extends EventTarget {
  /** @type {WireState} */
  state = "off";
  tries = 0;
  /** @type {string | null} what takes the conversation up again once its connection is lost */
  token = null;

  /** Connect, and again whenever the connection is lost, until the session has come to its end. */
  async connect() {
    this.leave();
    const attempt = (this.attempt = {});
    this.refused = null;
    this.turn("connecting");
    const model = await this.ask(attempt);
    if (model === undefined || attempt !== this.attempt) return;
    this.socket = new WebSocket(this.address(model), this.protocols());
    this.socket.onmessage = ({ data }) => this.received(JSON.parse(data));
    this.socket.onclose = (event) => this.closed(event);
  }

  /** Another session in the place of this one, once that is closed. */
  async renew() {
    const { socket } = this;
    this.leave();
    this.token = null;
    const attempt = (this.attempt = {});
    this.turn("connecting");
    if (socket) await new Promise((resolve) => socket.addEventListener("close", resolve));
    if (attempt === this.attempt) this.connect();
  }

  /** Say what is served, before there is a connection; a refusal comes with that. */
  async look() {
    const answer = await fetch(here("v1/models"), { headers: headers() }).catch(() => null);
    if (answer?.ok) this.emit("models", await answer.json());
  }

  /** An event of the server; before there is a session, an error is its reason to refuse one. */
  received(event) {
    if (event.type === "session.created") this.token = event.session.mosstalk?.resume?.token;
    if (this.state === "connecting" && event.type === "error") this.refused = event.error;
    else this.emit("message", event);
  }

  /** Ask which models there are: unlike a WebSocket, fetch tells why it is refused. */
  async ask(attempt) {
    let answer;
    try {
      answer = await fetch(here("v1/models"), { headers: headers() });
    } catch {
      if (attempt === this.attempt) this.wait(["unreachable"]);
      return undefined;
    }
    if (attempt !== this.attempt) return undefined;
    if (answer.ok) {
      const models = await answer.json().catch(() => ({}));
      this.emit("models", models);
      return models.data?.[0]?.id ?? "";
    }
    if (answer.status === 401 || answer.status === 403) {
      this.turn("key", { why: key.get() ? ["key-unknown"] : null });
    } else this.wait(await refusalOf(answer));
    return undefined;
  }

  /** @param {string} model */
  address(model) {
    const url = here("v1/realtime");
    url.protocol = url.protocol.replace("http", "ws");
    if (model) url.searchParams.set("model", model);
    if (this.token) url.searchParams.set("resume", this.token);
    return url;
  }

  protocols() {
    return key.get() ? ["realtime", `openai-insecure-api-key.${key.get()}`] : ["realtime"];
  }

  /** The session is there. */
  opened() {
    this.tries = 0;
    this.turn("open");
  }

  /** @param {CloseEvent} event */
  async closed({ code, reason }) {
    this.socket = null;
    const attempt = this.attempt;
    if (this.refused?.code === "invalid_resume_token") {
      this.token = null;
      this.connect();
      return;
    }
    if (this.state === "open" && ENDED.includes(code)) {
      this.turn("off", { why: because("session-ended", reason) });
      return;
    }
    const why =
      this.state === "open" ? because("dropped", reason, { code }) : await this.refusal();
    if (attempt === this.attempt) this.wait(why, this.refused?.retry_after_s);
  }

  /** Why no session came about, as far as the server says. */
  async refusal() {
    if (this.refused) return because("no-session", this.refused.message);
    const answer = await fetch(here("ready")).catch(() => null);
    return answer && !answer.ok ? refusalOf(answer) : ["no-session"];
  }

  /** Try again by and by. @param {Saying} why @param {number} least seconds from now */
  wait(why, least = 0) {
    const backoff = WAITS_S[Math.min(this.tries, WAITS_S.length - 1)];
    const seconds = Math.max(backoff * (0.8 + 0.4 * Math.random()), least);
    this.tries++;
    this.turn("waiting", { why, seconds });
    this.timer = setTimeout(() => this.connect(), 1000 * seconds);
  }

  /** Drop the socket that there is, unheard. */
  leave() {
    clearTimeout(this.timer);
    this.attempt = null;
    if (!this.socket) return;
    this.socket.onmessage = this.socket.onclose = null;
    this.socket.close();
    this.socket = null;
  }

  /** Send an event, if there is someone to hear it. @param {object} event */
  send(event) {
    if (this.socket?.readyState !== WebSocket.OPEN) return;
    this.socket.send(JSON.stringify(event));
    this.emit("sent", event);
  }

  /** @param {WireState} state */
  turn(state, detail = {}) {
    this.state = state;
    this.emit("state", { state, ...detail });
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** A saying, with its reason if there is one. @returns {Saying} */
const because = (key, reason, values = {}) =>
  reason ? [`${key}-why`, { ...values, reason }] : [key, values];

/** What a response other than 200 says of itself. @param {Response} answer @returns {Promise<Saying>} */
async function refusalOf(answer) {
  const body = await answer.json().catch(() => ({}));
  return because("answers", body.error?.message ?? body.failure, { status: answer.status });
}

/**
 * A text in a voice, as wav. Rejects with {saying} where the server gives none.
 * @param {string} input @param {string} voice @param {string} model @returns {Promise<Blob>}
 */
export async function readAloud(input, voice, model) {
  const answer = await fetch(here("v1/audio/speech"), {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify({ model: model || "mosstalk", input, voice, response_format: "wav" }),
  });
  if (!answer.ok) throw Object.assign(new Error(), { saying: await refusalOf(answer) });
  return answer.blob();
}
