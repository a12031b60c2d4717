// A weather agent on Mastra: an Agent with one tool, on a model of an OpenAI-compatible server. Takes {questions,
// stream} as JSON in its argument, and the proxy from OPENAI_BASE_URL and OPENAI_API_KEY; prints {answer} as JSON.
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const { questions, stream = false } = JSON.parse(process.argv[2]);
const weather = createTool({
  id: "weather",
  description: "The forecast of a city.",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city, days }) => `${city}, next ${days} days: rain`,
});
const agent = new Agent({
  id: "forecaster",
  name: "Forecaster",
  instructions: "You are a weather assistant. Look the forecast up before you answer.",
  model: { id: "areal/policy", url: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY },
  tools: { weather },
});

const messages = [];
let answer = "";
for (const content of questions) {
  messages.push({ role: "user", content });
  const result = await (stream ? agent.stream(messages) : agent.generate(messages));
  answer = await result.text;
  const response = await result.response;
  messages.push(...response.messages);
}
console.log(JSON.stringify({ answer }));
