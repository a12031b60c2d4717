// A weather agent on Vercel's AI SDK: generateText or streamText with one tool, until the model calls it no more.
// Takes {questions, api, stream} as JSON in its argument, and the proxy from OPENAI_BASE_URL and OPENAI_API_KEY;
// prints {answer} as JSON. api "chat" is createOpenAICompatible; "responses" is createOpenAI, which stores replies.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const { questions, api = "chat", stream = false } = JSON.parse(process.argv[2]);
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const provider =
  api === "chat" ? createOpenAICompatible({ name: "areal", baseURL, apiKey }) : createOpenAI({ baseURL, apiKey });
const weather = tool({
  description: "The forecast of a city.",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city, days }) => `${city}, next ${days} days: rain`,
});

const messages = [];
let answer = "";
for (const content of questions) {
  messages.push({ role: "user", content });
  const options = {
    model: provider("policy"),
    instructions: "You are a weather assistant. Look the forecast up before you answer.",
    messages,
    tools: { weather },
    stopWhen: isStepCount(10),
  };
  const result = stream ? streamText(options) : await generateText(options);
  answer = await result.text;
  messages.push(...(await result.responseMessages));
}
console.log(JSON.stringify({ answer }));
