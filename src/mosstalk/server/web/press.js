// The big button and the keyboard: hold to talk, or tap to begin and tap again to send.

const TAP_MS = 250;
const TYPED_IN = "input, textarea, select, button, summary, a, [contenteditable]";

/**
 * @param {HTMLButtonElement} button
 * @param {{active: () => boolean, on: () => boolean, down: () => void, up: (at: number) => void}} talk
 *   what a press does, if `active`; `on` says whether a turn is being held
 */
export function holdToTalk(button, talk) {
  let downAt = 0;
  let latched = false;
  const down = () => {
    if (!talk.active()) return;
    latched = talk.on();
    downAt = performance.now();
    if (!latched) talk.down();
  };
  // A short tap leaves the microphone open until the next one.
  const up = (event) => {
    if (talk.on() && (latched || performance.now() - downAt > TAP_MS)) talk.up(event.timeStamp);
  };
  byPointer(button, down, up);
  byKey(button, talk.active, down, up);
  // A click without a pointer comes from a screen reader.
  button.addEventListener("click", (event) => {
    if (!talk.active() || event.detail || event.pointerType) return;
    if (talk.on()) talk.up(event.timeStamp);
    else talk.down();
  });
}

function byPointer(button, down, up) {
  button.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    button.setPointerCapture(event.pointerId);
    down();
  });
  button.addEventListener("pointerup", up);
  button.addEventListener("pointercancel", up);
  button.addEventListener("contextmenu", (event) => event.preventDefault());
}

/** Space anywhere but in fields and on other buttons; Enter too on the button itself. */
function byKey(button, active, down, up) {
  const ours = ({ target, key }) => {
    if (!active()) return false;
    if (target === button) return key === " " || key === "Enter";
    return key === " " && !(target instanceof Element && target.closest(TYPED_IN));
  };
  let held = null;
  addEventListener("keydown", (event) => {
    if (!ours(event) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    if (event.repeat || held) return;
    held = event.key;
    down();
  });
  addEventListener("keyup", (event) => {
    if (event.key !== held) return;
    event.preventDefault();
    held = null;
    up(event);
  });
  // Another window gets the key's release.
  addEventListener("blur", (event) => {
    if (held) up(event);
    held = null;
  });
}
