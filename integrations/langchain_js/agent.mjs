// A weather agent on LangChain.js: createAgent with ChatOpenAI and one tool. Takes {questions, api, stream} as
// JSON in its argument, and the proxy from OPENAI_BASE_URL and OPENAI_API_KEY; prints {answer} as JSON.
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const { questions, api = "chat", stream = false } = JSON.parse(process.argv[2]);
const weather = tool(({ city, days }) => `${city}, next ${days} days: rain`, {
  name: "weather",
  description: "The forecast of a city.",
  schema: z.object({ city: z.string(), days: z.number() }),
});
const agent = createAgent({
  model: new ChatOpenAI({ model: "policy", useResponsesApi: api === "responses" }),
  tools: [weather],
  systemPrompt: "You are a weather assistant. Look the forecast up before you answer.",
});

let messages = [];
for (const content of questions) {
  const state = { messages: [...messages, { role: "user", content }] };
  if (stream) {
    const pieces = await agent.stream(state, { streamMode: ["messages", "values"] });
    for await (const [mode, piece] of pieces) if (mode === "values") messages = piece.messages;
  } else ({ messages } = await agent.invoke(state));
}
console.log(JSON.stringify({ answer: messages.at(-1).text }));
