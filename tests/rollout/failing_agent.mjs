// failing_agents.py for Node.
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { connect } from "node:net";

const FLOOD = 300;
const task = JSON.parse(readFileSync(0, "utf8"));
const { OPENAI_BASE_URL: base, OPENAI_API_KEY: key, AREAL_AGENTS_EPISODE_ID: id } = process.env;
const root = base.split("/e/")[0];

function post(url, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  return fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
}

async function ask(content = "Hi", more = {}) {
  const messages = [{ role: "user", content }];
  const response = await post(`${base}/chat/completions`, { model: "policy", messages, ...more });
  if (!response.ok) throw new Error(await response.text());
  return response;
}

async function reward(body) {
  const response = await post(`${root}/episodes/${id}/reward`, body);
  if (!response.ok) throw new Error(await response.text());
}

async function misbehavior() {
  const path = `${task.decisions}/${id}`;
  const deadline = Date.now() + 60_000;
  while (!existsSync(path)) {
    if (Date.now() > deadline) throw new Error("the test has decided nothing");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  return readFileSync(path, "utf8");
}

async function play(how) {
  if (how === "silent") return;
  if (how === "raises") throw new Error("boom");
  if (how === "exits") process.exit(3);
  if (how === "hangs" || how === "dropped") {
    await reward({ reward: 0.25, name: "so far" });
    await (await ask()).text();
    await new Promise((resolve) => setTimeout(resolve, 3_600_000));
  }
  if (how === "floods") {
    await Promise.all(Array.from({ length: FLOOD }, async (_, n) => (await ask(`Call ${n}`)).text()));
  }
  if (how === "forks") spawn("sleep", [task.nap], { detached: true, stdio: "ignore" });
  if (how === "sockets") {
    const stream = await ask("slowly", { stream: true });
    await stream.body.getReader().read();
    const { hostname, port } = new URL(base);
    await new Promise((resolve) => connect(Number(port), hostname, resolve));
  }
  await (await ask()).text();
}

await play(await misbehavior());
await reward({ reward: 1.0 });
process.exit(0); // with whatever is open
