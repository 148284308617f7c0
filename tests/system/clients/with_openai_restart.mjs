// openai's Realtime classes outlive a server: node with_openai_restart.mjs
// It says "talked" when the server may be ended and begun anew, and then waits for the new one.
import { writeSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are installed in the working directory, this file is not there.
const places = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(places.resolve(name).replace(/\.js$/, ".mjs")).href);
const { default: OpenAI } = await load("openai");
const { OpenAIRealtimeWS } = await load("openai/realtime/ws");
const { OpenAIRealtimeWebSocket } = await load("openai/realtime/websocket");

const again = { reconnect: true, maxReconnectAttempts: 10_000, reconnectMaxDelay: 1000 };
const ever = (talk, kind) => new Promise((resolve) => { talk.on(kind, resolve); });

/** Ask for an answer in writing; its words. */
async function asked(talk, text) {
  const content = [{ type: "input_text", text }];
  talk.send({ type: "conversation.item.create", item: { type: "message", role: "user", content } });
  talk.send({ type: "response.create", response: { output_modalities: ["text"] } });
  const { response } = await ever(talk, "response.done");
  return response.output[0].content[0].text;
}

const talks = [OpenAIRealtimeWS, OpenAIRealtimeWebSocket].map((Talk) => {
  const talk = new Talk({ model: "any", ...again }, new OpenAI());
  const told = { name: Talk.name, codes: [] };
  talk.on("reconnecting", ({ closeCode }) => told.codes.push(closeCode));
  talk.on("error", () => {}); // one for each attempt that finds nobody
  return { talk, told, begun: ever(talk, "session.created"), back: ever(talk, "reconnected") };
});
for (const { talk, told, begun } of talks) {
  await begun;
  told.before = await asked(talk, "What is the capital of France?");
}
writeSync(1, "talked\n");
for (const { talk, told, back } of talks) {
  await back;
  told.after = await asked(talk, "What is the capital of Italy?");
  talk.close();
}
writeSync(1, `${JSON.stringify(talks.map(({ told }) => told))}\n`);
