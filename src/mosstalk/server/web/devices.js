// Which microphone and loudspeaker there are. Browsers name them once the microphone was allowed.

import { offer } from "./choices.js";

const KINDS = { microphone: "audioinput", loudspeaker: "audiooutput" };
/** Chromium lists the system's own device once more under these. */
const SYSTEMS = ["", "default", "communications"];

/** @param {HTMLFormControlsCollection} fields of the settings */
export function watchDevices(fields) {
  fields.loudspeaker.closest("label").hidden = !("setSinkId" in AudioContext.prototype);
  navigator.mediaDevices?.addEventListener("devicechange", () => listDevices(fields));
}

/** Offer what there is now. @param {HTMLFormControlsCollection} fields */
export async function listDevices(fields) {
  const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
  for (const [name, kind] of Object.entries(KINDS)) {
    const these = found.filter((one) => one.kind === kind && !SYSTEMS.includes(one.deviceId));
    const offered = these.map(({ deviceId, label }, place) => ({
      value: deviceId,
      saying: label ? ["plain", { text: label }] : ["device-unnamed", { number: place + 1 }],
    }));
    offer(fields[name], offered);
  }
}

/**
 * Have all sound come from the loudspeaker that is chosen, or show again the one before.
 * @param {HTMLSelectElement} select @param {import("./sound.js").Sound} sound
 * @param {import("./player.js").Player} player
 * @returns {Promise<import("./words.js").Saying | null>} why it cannot
 */
export async function speakTo(select, sound, player) {
  try {
    await sound.speakTo(select.value);
    await player.speakTo(select.value);
    return null;
  } catch ({ message }) {
    select.value = sound.speaker;
    return ["speaker-refused", { message }];
  }
}
