// What the page says, in the visitor's language. English that never changes is in index.html alone.

import { CHINESE } from "./chinese.js";
import { ENGLISH } from "./english.js";

/** @typedef {[key: string, values?: Record<string, unknown>]} Saying what is said, in no language yet */

const WORDS = { en: { ...ENGLISH }, zh: CHINESE };
const TAGS = { en: "en", zh: "zh-CN" };
/** What an element says, where each is kept, and what it is shown by. */
const PARTS = [
  ["say", "with", (element, text) => (element.textContent = text)],
  ["sayLabel", "labelWith", (element, text) => element.setAttribute("aria-label", text)],
  ["sayPlaceholder", "placeholderWith", (element, text) => (element.placeholder = text)],
];

/** @type {"en" | "zh"} */
let language = "en";

for (const element of document.querySelectorAll("[data-say], [data-say-placeholder]")) {
  const { say: key, sayPlaceholder } = element.dataset;
  if (key) WORDS.en[key] ??= element.textContent;
  if (sayPlaceholder) WORDS.en[sayPlaceholder] ??= element.placeholder;
}

/** @returns {"en" | "zh"} what the address asks for with `?lang=`, else what the browser prefers */
export function wanted() {
  const asked = new URLSearchParams(location.search).get("lang") ?? navigator.language;
  return asked.toLowerCase().startsWith("zh") ? "zh" : "en";
}

/** A text with its values filled in. @param {string} key @param {Record<string, unknown>} [values] */
export function words(key, values = {}) {
  const text = WORDS[language][key] ?? WORDS.en[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    return Array.isArray(value) ? words(...value) : String(value);
  });
}

/** Have an element say something, in whichever language is chosen, now or later. */
export function put(element, key, values, part = "say") {
  const [say, kept, show] = PARTS.find(([name]) => name === part);
  const given = values ? JSON.stringify(values) : "";
  if (element.dataset[say] === key && (element.dataset[kept] ?? "") === given) return;
  element.dataset[say] = key;
  element.dataset[kept] = given;
  show(element, words(key, values));
}

/** Say everything on the page in a language. @param {"en" | "zh"} chosen */
export function speak(chosen) {
  language = chosen;
  document.documentElement.lang = TAGS[chosen];
  for (const [say, kept, show] of PARTS) {
    const name = say.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
    for (const element of document.querySelectorAll(`[data-${name}]`)) {
      const given = element.dataset[kept];
      show(element, words(element.dataset[say], given ? JSON.parse(given) : {}));
    }
  }
}
