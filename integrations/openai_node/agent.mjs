// A weather agent on the Node OpenAI client. Takes {questions, api, stream} as JSON in its argument, the place
// to call from OPENAI_BASE_URL and OPENAI_API_KEY, and prints {answer, streamed} as JSON.
import OpenAI from "openai";

const { questions, api = "chat", stream = false } = JSON.parse(process.argv[2]);
const client = new OpenAI();
const model = "policy";
const instructions = "You are a weather assistant. Look the forecast up before you answer.";
const weather = {
  name: "weather",
  description: "The forecast of a city.",
  strict: true,
  parameters: {
    type: "object",
    properties: { city: { type: "string" }, days: { type: "number" } },
    required: ["city", "days"],
    additionalProperties: false,
  },
};
const forecast = ({ city, days }) => `${city}, next ${days} days: rain`;
let streamed = ""; // every piece of text that came as a delta

async function chatReply(messages) {
  const options = { model, messages, tools: [{ type: "function", function: weather }] };
  if (!stream) return (await client.chat.completions.create(options)).choices[0].message;
  const events = client.chat.completions.stream(options);
  events.on("content", (delta) => (streamed += delta));
  return (await events.finalChatCompletion()).choices[0].message;
}

async function chat() {
  const messages = [{ role: "system", content: instructions }];
  let message;
  for (const content of questions) {
    messages.push({ role: "user", content });
    for (;;) {
      message = await chatReply(messages);
      messages.push(message);
      if (!message.tool_calls?.length) break;
      for (const call of message.tool_calls) {
        const content = forecast(JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    }
  }
  return message.content;
}

async function response(input) {
  const options = { model, instructions, input, tools: [{ type: "function", ...weather }] };
  if (!stream) return client.responses.create(options);
  const events = client.responses.stream(options);
  events.on("response.output_text.delta", (event) => (streamed += event.delta));
  return events.finalResponse();
}

async function responses() {
  const input = [];
  let reply;
  for (const content of questions) {
    input.push({ role: "user", content });
    for (;;) {
      reply = await response(input);
      input.push(...reply.output);
      const calls = reply.output.filter((item) => item.type === "function_call");
      if (!calls.length) break;
      for (const call of calls) {
        const output = forecast(JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  }
  return reply.output_text;
}

const answer = await (api === "chat" ? chat() : responses());
console.log(JSON.stringify({ answer, streamed }));
