// What the page says at one time or another; what it always shows is in index.html.

/** @type {Record<string, string>} {names} are filled in */
export const ENGLISH = {
  plain: "{text}",
  again: "{why} Trying again in {seconds} s.",

  // The connection.
  connecting: "Connecting …",
  "key-needed": "A key is needed.",
  "key-unknown": "The server does not know this key.",
  unreachable: "The server cannot be reached.",
  "session-ended": "The server ended the session.",
  "session-ended-why": "The server ended the session: {reason}.",
  "no-session": "The server took no new session; it does not say why.",
  "no-session-why": "The server takes no new session: {reason}.",
  dropped: "The connection was lost (code {code}).",
  "dropped-why": "The connection was lost ({reason}, code {code}).",
  answers: "The server answers {status}.",
  "answers-why": "The server answers {status}: {reason}.",
  warns: "The server says: {warnings}.",
  "new-session": "A new session: the server knows nothing of what was said before.",

  // The conversation's states.
  "ready-held": "Ready: hold the button and speak.",
  "ready-hands-free": "Listening: just speak.",
  "ready-muted": "Your microphone is muted. Press “Talk” to be heard again.",
  "ready-written": "Ready: write, or press “Talk”.",
  "hearing-held": "Listening: let go when you have finished.",
  "hearing-hands-free": "Hearing you …",
  thinking: "Waiting for the answer …",
  "speaking-held": "Answering. Press to interrupt.",
  "speaking-hands-free": "Answering. Speak to interrupt.",
  mute: "Mute",
  "let-go": "Let go to send",
  "hint-held": "Hold and speak, or tap once to begin and once to send.",
  "hint-held-keys": "Hold the button or the space bar and speak, or tap once to begin and once to send. Escape stops the reply.",
  "hint-hands-free": "A pause ends your turn. Speaking stops the reply.",
  "hint-hands-free-keys": "A pause ends your turn. Speaking, or Escape, stops the reply.",
  "no-detector": "This server finds no ends of turns: hold to talk.",
  "too-short": "That was too short: hold while you speak.",
  "only-silence": "The microphone gives only silence.",
  "no-answer": "No answer: {reason}",

  // The microphone. The first of each pair is the state, the second what to do.
  microphone: "{state} {todo} Writing works.",
  "microphone-state": "{state} You can write.",
  asking: "The browser asks for the microphone.",
  "asking-todo": "Allow it.",
  denied: "The microphone is denied.",
  "denied-todo": "Allow it where the browser shows this page's permissions (beside the address, or in the system's settings for the browser), then press “Talk”.",
  missing: "No microphone was found.",
  "missing-todo": "Connect one, then press “Talk”.",
  busy: "The microphone cannot be opened.",
  "busy-todo": "Another program may be using it. Close that, then press “Talk”.",
  unusable: "The microphone cannot be used.",
  "unusable-todo": "The browser says: {message}. Choose another in the settings, or press “Talk” to try again.",
  lost: "The microphone is gone.",
  "lost-todo": "It was unplugged, or the browser took it back. Connect it, then press “Talk”.",
  insecure: "The microphone is withheld, because this page came over plain http from another machine.",
  "insecure-todo": "To talk from a phone or another computer in the house, start the server with “--tls-self-signed --host 0.0.0.0” and open the https address that it prints. Or type “ssh -L 8000:localhost:{port} {host}” on this machine and open http://localhost:8000. Replies come as text until then.",

  // What can be asked, by the kind of weights.
  "can-pocket": "This small model runs on any computer and knows short questions in English: capitals, sums, opposites, days, animals, jokes. To all else it should say “I don't know that.” Press “Talk” and ask, or try one of these:",
  "can-synthetic": "These weights are random: the model makes noise in place of speech, to try the machinery with.",
  "can-other": "Press “Talk” and speak, or write. For example:",

  // The bubbles.
  spoken: "spoken",
  "spoken-for": "spoken, {seconds} s",
  speaking: "speaking …",
  "stopped-after": "stopped after {seconds} s",
  "heard-for": "sound, {seconds} s",
  play: "Play",
  "stop-playing": "Stop",
  save: "Save",
  "not-played": "The sound cannot be played: {message}.",

  // Time to the answer.
  "from-held": "turn {turn}: from letting go to the first sound heard",
  "from-hands-free": "turn {turn}: from your last sound to the first sound heard; {wait} ms of it waiting for a pause",
  "from-typed": "turn {turn}: from sending to the first sound heard",
  "from-unasked": "turn {turn}",
  "from-text": "turn {turn}: to the first text",
  plot: "Bars: the time to each of the last answers and its parts, as in the table below.",

  // Settings.
  "device-unnamed": "device {number}",
  "speaker-refused": "This loudspeaker cannot be used: {message}.",
  previewing: "Reading …",
};
