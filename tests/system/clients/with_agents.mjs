// @openai/agents-realtime in Node: node with_agents.mjs wss://host:port/v1/realtime speech.pcm
import { readFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are installed in the working directory, this file is not there.
const places = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(places.resolve(name).replace(/\.js$/, ".mjs")).href);
const { RealtimeAgent, RealtimeSession, tool } = await load("@openai/agents-realtime");
const { z } = await load("zod");

const [url, speech] = process.argv.slice(2);
const weather = tool({
  name: "weather",
  description: "What the weather is like.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `rain in ${city}`,
});
const clerk = new RealtimeAgent({
  name: "Clerk", instructions: "Be brief.", voice: "default", tools: [weather],
});
let watchful = false; // of one answer, whatever it says
const outputGuardrails = [{
  name: "not this one",
  execute: async () => {
    const tripwireTriggered = watchful;
    watchful = false;
    return { tripwireTriggered, outputInfo: {} };
  },
}];
const session = new RealtimeSession(clerk, { transport: "websocket", outputGuardrails });

const events = [], kinds = [], errors = [];
let samples = 0, wake = () => {};
session.on("audio", ({ data }) => { samples += data.byteLength / 2; wake(); });
session.on("error", (error) => { errors.push(error); wake(); });
for (const kind of ["agent_end", "audio_interrupted", "history_updated", "guardrail_tripped"]) {
  session.on(kind, () => { kinds.push(kind); wake(); });
}
session.transport.on("*", (event) => { events.push(event); wake(); });

async function until(met) {
  while (!met()) await new Promise((resolve) => { wake = resolve; });
}
const count = (kind) => kinds.filter((each) => each === kind).length;
const done = () => events.filter(({ type }) => type === "response.done").length;
const words = (place) => session.history[place]?.content[0]?.transcript ?? "";
const told = { samples: {} };

/** Type something, and wait for the whole answer. */
async function asked(text) {
  const [before, heard] = [done(), samples];
  session.sendMessage(text);
  await until(() => done() > before);
  return samples - heard;
}

await session.connect({ url, apiKey: process.env.OPENAI_API_KEY });
told.samples.typed = await asked("What is the capital of France?");

const pcm = readFileSync(speech);
let heard = samples;
for (let start = 0; start < pcm.length; start += 4800) {
  session.sendAudio(new Uint8Array(pcm.subarray(start, start + 4800)).buffer);
}
await until(() => done() === 2 && words(2));
told.samples.spoken = samples - heard;

heard = samples;
session.sendMessage("Tell me a joke.");
await until(() => samples > heard);
session.interrupt();
const joke = () => session.history[5];
const retrieved = ({ type, item }) => (
  type === "conversation.item.retrieved" && item.id === joke()?.itemId
);
await until(() => done() === 3 && events.some(retrieved));
told.interrupted = events.findLast(({ type }) => type === "response.done").response.status;
told.roles = session.history.map(({ role }) => role);
told.words = [words(1), words(2), words(3), words(5)];

// What is to be forgotten goes, and what was asked is put in other words, in its place.
const content = [{ type: "input_text", text: "What is the capital of Italy?" }];
session.updateHistory((history) => [{ ...history[0], content }, ...history.slice(3)]);
await until(() => session.history.length === 4 && session.history[0].content[0].text.includes("Italy"));
told.replaced = session.history.map(({ role }) => role);

watchful = true;
session.sendMessage("What is the capital of Spain?");
await until(() => count("guardrail_tripped"));
await until(() => done() === 5);
const kind = new RealtimeAgent({ name: "Second", instructions: "Be kind.", voice: "alloy" });
await session.updateAgent(kind);
const updated = () => events.findLast(({ type }) => type === "session.updated").session;
await until(() => updated().instructions === "Be kind.");
told.warnings = updated().mosstalk.warnings;
told.samples.after = await asked("Hello.");

told.errors = errors.map(({ error }) => error.error?.code ?? String(error));
session.transport.sendEvent({ type: "no.such.event" });
await until(() => errors.length > told.errors.length);
told.refused = errors.at(-1).error.error.code;
told.interruptions = count("audio_interrupted");
told.usage = session.usage.totalTokens;
session.close();
writeSync(1, `${JSON.stringify(told)}\n`);
