// openai's Realtime classes for JavaScript against a server that speaks TLS:
// node with_openai_realtime.mjs https://host:port question.pcm OpenAIRealtimeWS|OpenAIRealtimeWebSocket
import { readFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are installed in the working directory, this file is not there.
const places = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(places.resolve(name).replace(/\.js$/, ".mjs")).href);
const { default: OpenAI } = await load("openai");
const { OpenAIRealtimeWS } = await load("openai/realtime/ws");
const { OpenAIRealtimeWebSocket } = await load("openai/realtime/websocket");

const [url, question, name] = process.argv.slice(2);
const Talk = { OpenAIRealtimeWS, OpenAIRealtimeWebSocket }[name];
const baseURL = `${url}/v1`;
const told = { words: {}, samples: {}, status: {}, errors: [] };

// With the key of a page: one that expires.
const secret = await new OpenAI({ baseURL }).realtime.clientSecrets.create({
  session: { type: "realtime", instructions: "Be brief." },
});
const dial = (apiKey) => Talk.create(
  new OpenAI({ baseURL, apiKey, organization: "org-any", project: "proj_any" }), { model: "any" },
);
const talk = await dial(secret.value);

const events = [];
let wake = () => {};
talk.on("event", (event) => { events.push(event); wake(); });
talk.on("error", ({ name, error }) => told.errors.push([name, error?.code, error?.event_id]));

let place = 0;
/** The next event of a type, after the one that was found last. */
async function next(type) {
  for (;;) {
    while (place < events.length) {
      const event = events[place++];
      if (event.type === type) return event;
    }
    await new Promise((resolve) => { wake = resolve; });
  }
}

/** Ask for an answer, and keep what it says. */
async function answered(turn, response = {}) {
  talk.send({ type: "response.create", response });
  const { response: done } = await next("response.done");
  const deltas = (type) => events
    .filter((event) => event.response_id === done.id && event.type === `response.${type}.delta`)
    .map(({ delta }) => delta);
  told.words[turn] = [...deltas("output_audio_transcript"), ...deltas("output_text")].join("");
  told.samples[turn] = Buffer.concat(
    deltas("output_audio").map((delta) => Buffer.from(delta, "base64")),
  ).length / 2;
  told.status[turn] = done.status;
}

const typed = (text) => talk.send({
  type: "conversation.item.create",
  item: { type: "message", role: "user", content: [{ type: "input_text", text }] },
});

told.began = (await next("session.created")).session.instructions;
const byHand = { input: { turn_detection: null } };
talk.send({
  type: "session.update",
  session: { type: "realtime", instructions: "Be kind.", audio: byHand },
});
told.updated = (await next("session.updated")).session.instructions;

typed("What is the capital of France?");
await answered("typed");
typed("And of Italy?");
await answered("written", { output_modalities: ["text"] });

const pcm = readFileSync(question);
for (let start = 0; start < pcm.length; start += 4800) {
  const audio = pcm.subarray(start, start + 4800).toString("base64");
  talk.send({ type: "input_audio_buffer.append", audio });
}
talk.send({ type: "input_audio_buffer.commit" });
await answered("spoken");

typed("Tell me a joke.");
talk.send({ type: "response.create" });
const { item_id } = await next("response.output_audio.delta");
talk.send({ type: "response.cancel" });
talk.send({ type: "conversation.item.truncate", item_id, content_index: 0, audio_end_ms: 80 });
told.status.interrupted = (await next("response.done")).response.status;
const cut = await next("conversation.item.truncated");
told.cut = [cut.item_id === item_id, cut.audio_end_ms];

talk.send({ type: "conversation.item.retrieve", item_id: "item_nobody", event_id: "mine" });
await next("error");
talk.send({ type: "no.such.event", event_id: "other" });
await next("error");
typed("Hello.");
await answered("after");

const closed = new Promise((resolve) => talk.socket.addEventListener("close", resolve));
talk.close();
told.closed = (await closed).code;
const stranger = await dial("ek_of_nobody");
told.stranger = await new Promise((resolve) => {
  stranger.on("error", ({ name }) => resolve(name));
});
writeSync(1, `${JSON.stringify(told)}\n`);
