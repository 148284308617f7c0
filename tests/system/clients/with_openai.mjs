// openai for JavaScript against a server: node with_openai.mjs https://host:port question.wav
import { readFileSync, writeSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package is installed in the working directory, this file is not there.
const place = createRequire(`${process.cwd()}/`).resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(place).href);

const [url, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, maxRetries: 0 });
const completions = client.chat.completions;
const spoken = (format) => ({ modalities: ["text", "audio"], audio: { voice: "default", format } });
const asked = { role: "user", content: "What is the capital of France?" };
const told = {};

const whole = await completions.create({ model: "any", messages: [asked], ...spoken("wav") });
const message = whole.choices[0].message;
told.whole = message.audio.transcript;
told.header = Buffer.from(message.audio.data, "base64").subarray(0, 4).toString();
told.samples = (Buffer.from(message.audio.data, "base64").length - 44) / 2;

const stream = await completions.create({
  model: "any", messages: [asked], ...spoken("pcm16"), stream: true,
  stream_options: { include_usage: true },
});
told.streamed = { words: "", samples: 0, reason: null, usage: null };
for await (const chunk of stream) {
  const [choice] = chunk.choices;
  told.streamed.words += choice?.delta.audio?.transcript ?? "";
  told.streamed.samples += Buffer.from(choice?.delta.audio?.data ?? "", "base64").length / 2;
  told.streamed.reason ??= choice?.finish_reason ?? null;
  told.streamed.usage ??= chunk.usage?.total_tokens ?? null;
}
told.usage = whole.usage.total_tokens;

const messages = [asked, message, { role: "user", content: "And of Italy?" }];
told.next = (await completions.create({ model: "any", messages })).choices[0].message.content;

const data = readFileSync(question).toString("base64");
const sound = { type: "input_audio", input_audio: { data, format: "wav" } };
const heard = await completions.create({
  model: "any", messages: [{ role: "user", content: [sound] }], ...spoken("mp3"),
});
told.heard = heard.usage.prompt_tokens_details.audio_tokens;
told.answered = heard.choices[0].message.audio.transcript;

const helper = completions.stream({ model: "any", messages: [asked] });
told.helped = await helper.finalContent();

try {
  await completions.create({ model: "any", messages: [asked], n: 2 });
} catch (error) {
  told.refused = [error.constructor.name, error.code, error.param];
}
const leaving = await completions.create({
  model: "any", messages: [asked], ...spoken("pcm16"), stream: true,
});
for await (const chunk of leaving) {
  if (chunk.choices[0].delta.audio?.data) break;
}
writeSync(1, `${JSON.stringify(told)}\n`);
