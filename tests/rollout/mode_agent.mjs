// The weather agent of mode_agents.py for Node. Its argument is a folder that has OpenAI's package.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const OpenAI = createRequire(`${process.argv[2]}/`)("openai");
const task = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI();
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "weather", description: "The forecast of a city.", parameters };
const messages = [
  { role: "system", content: "Look the forecast up before you answer." },
  { role: "user", content: task.question },
];
const completions = [];
for (;;) {
  const tools = [{ type: "function", function: weather }];
  const completion = await client.chat.completions.create({ model: "policy", messages, tools });
  const { message } = completion.choices[0];
  completions.push(completion.id);
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    const content = `${JSON.parse(call.function.arguments).city}: rain`;
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}

async function reward(body) {
  const root = process.env.OPENAI_BASE_URL.split("/e/")[0];
  const response = await fetch(`${root}/episodes/${process.env.AREAL_AGENTS_EPISODE_ID}/reward`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await response.text());
}

await reward({ reward: 0.25, completion_id: completions[0], name: "looked up" });
await reward({ reward: Number(messages.at(-1).content.includes(task.answer)) });
