// The openai package for Node against a running server: node openai_node.mjs BASE_URL MODEL.
// Whole answers, streams, the streaming helper, errors by class, an abort. Needs `npm install openai` in a folder above.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Count to five." }];
const fields = { model, messages, temperature: 0, max_tokens: 8 };

const names = [];
for await (const entry of await client.models.list()) names.push(entry.id);
assert.ok(names.includes(model));
assert.equal((await client.models.retrieve(model)).id, model);

const whole = await client.chat.completions.create(fields);
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);
assert.equal(whole.usage.completion_tokens, 8);
assert.equal(whole.choices[0].finish_reason, "length");
assert.match(whole.system_fingerprint, /^fp_[0-9a-f]{16}$/);

let streamed = "";
let usage = null;
const options = { ...fields, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options)) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, 8);

const helper = client.chat.completions.stream(fields);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const completion = await client.completions.create({ model, prompt: "One, two,", temperature: 0, max_tokens: 4 });
assert.ok(completion.choices[0].text.length > 0);

await assert.rejects(client.chat.completions.create({ ...fields, model: "no-such-model" }), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ ...fields, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);

const left = await client.chat.completions.create({ ...fields, max_tokens: 1000, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break;
}
assert.equal((await client.chat.completions.create(fields)).choices[0].message.content, text);
console.log("openai for Node: all well");
