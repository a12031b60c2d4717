// An agent with one tool, in Node. `areal-agents train config.yaml` trains the model that it asks.
import { readFileSync } from "node:fs";

const { AREAL_AGENTS_TASK, AREAL_AGENTS_EPISODE_ID: id, OPENAI_BASE_URL: url, OPENAI_API_KEY } = process.env;
const task = JSON.parse(AREAL_AGENTS_TASK);
const facts = Object.entries(JSON.parse(readFileSync(new URL("facts.json", import.meta.url), "utf8")));
const instructions = "You are a search agent. Search for facts, then reply with the short answer only.";
const query = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };
const tool = { name: "search", description: "Search the encyclopedia.", parameters: query };

const search = (query) => facts.find(([name]) => query.includes(name))?.[1] ?? "No results.";

async function post(path, body) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${OPENAI_API_KEY}` };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function solve(messages) {
  const asked = { model: "policy", messages, tools: [{ type: "function", function: tool }], max_tokens: 48 };
  for (let call = 0; call < 4; call++) {
    const reply = (await post(`${url}/chat/completions`, asked)).choices[0].message;
    if (!reply.tool_calls?.length) return reply.content ?? "";
    messages.push(reply);
    for (const { id, function: f } of reply.tool_calls)
      messages.push({ role: "tool", tool_call_id: id, content: search(String(JSON.parse(f.arguments).query)) });
  }
  return "";
}

const answer = await solve([{ role: "system", content: instructions }, { role: "user", content: task.question }]);
await post(`${url.split("/e/")[0]}/episodes/${id}/reward`, { reward: answer.trim() === task.answer ? 1 : 0 });
