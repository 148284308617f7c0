// What the page says to people: what is going on, and what to do when something is not.

const ASKING = "Allow the microphone where the browser asks for it. You can write meanwhile.";

/** Of the conversation's states, by who ends turns. */
export const STATUS = {
  held: {
    off: "Connecting …",
    asking: ASKING,
    waiting: "Ready: hold the button, or the space bar, and speak.",
    hearing: "Listening: let go when you have finished.",
    thinking: "Waiting for the answer …",
    speaking: "Answering. Press to interrupt.",
  },
  "hands-free": {
    off: "Connecting …",
    asking: ASKING,
    waiting: "Listening: just speak.",
    hearing: "Hearing you …",
    thinking: "Waiting for the answer …",
    speaking: "Answering. Speak to interrupt.",
  },
};

/** What can be asked, by the kind of weights that the server says it has. */
export const GREETING = {
  pocket: "Ask me for a capital, a sum, an opposite or a joke, in English.",
};

/** What the page is without a session. */
export const CONNECTION = {
  off: "Not connected.",
  connecting: "Connecting …",
  waiting: "Not connected.",
  key: "A key is needed.",
};

export const HINT = {
  held: "Hold and speak, or tap once to begin and once to send. Escape stops the reply.",
  "hands-free": "A pause ends your turn. Speaking, or Escape, stops the reply.",
};

/** A browser gives neither microphone nor audio thread to a page like this one. */
export const INSECURE =
  `This page came over plain http from another machine, and browsers give no microphone to such ` +
  `pages. On this machine type “ssh -L 8000:localhost:${location.port || 80} ` +
  `${location.hostname}” and open http://localhost:8000, or start the server with --tls-self-signed. ` +
  `Until then you can write, and replies come as text.`;

const WITHHELD = {
  NotAllowedError:
    "The microphone is denied. Allow it where the browser shows this page's permissions (beside " +
    "the address, or in the system's settings for the browser), then press “Try the microphone again”. Writing works.",
  NotFoundError:
    "No microphone was found. Connect one, then press “Try the microphone again”. Writing works.",
  NotReadableError:
    "The microphone cannot be opened; another program may be using it. Close that, then press " +
    "“Try the microphone again”. Writing works.",
};

/** What to do about a microphone that is withheld. @param {DOMException} error */
export const withheld = (error) =>
  WITHHELD[error.name] ?? `The microphone cannot be used: ${error.message}. Writing works.`;

export const LOST = "The microphone is gone: it was unplugged, or the browser took it back.";
