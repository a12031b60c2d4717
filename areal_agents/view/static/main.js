// The frame of the page: access, the address, keyboard shortcuts, and which view is shown.
import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { read } from "./api.js";
import { Comparison } from "./comparison.js";
import { Episode } from "./episode.js";
import { Episodes } from "./episodes.js";
import { Group } from "./group.js";
import { Help } from "./help.js";
import { useKeys } from "./keys.js";
import { link, runLink, useRoute } from "./route.js";
import { Run } from "./run.js";
import { RunsList } from "./runs.js";
import { Step } from "./step.js";
import { useTheme } from "./theme.js";

function App() {
  const [session, setSession] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    const update = () => setSession({ needs_key: true, permitted: false });
    addEventListener("key-needed", update);
    enter().then(setSession, setError);
    return () => removeEventListener("key-needed", update);
  }, []);
  if (error) return html`<main><div class="problem"><b>No answer.</b> ${error.message}</div></main>`;
  if (session === null) return null;
  if (!session.permitted) return html`<${KeyForm} done=${setSession} />`;
  return html`<${Frame} session=${session} leave=${setSession} />`;
}

// The key may be in the fragment of a link, which a browser never sends; it is taken out of the address at once.
async function enter() {
  const given = /^#key=(.*)$/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", location.pathname + "#/");
    try {
      return await sendKey(decodeURIComponent(given[1]));
    } catch {
      return { needs_key: true, permitted: false };
    }
  }
  return read("session");
}

function sendKey(key) {
  const headers = { "content-type": "application/json" };
  return read("session", { method: "POST", headers, body: JSON.stringify({ key }) });
}

function KeyForm({ done }) {
  const [problem, setProblem] = useState("");
  const submit = (event) => {
    event.preventDefault();
    sendKey(event.target.elements.key.value).then(done, (error) => setProblem(error.message));
  };
  return html`<main><form class="card key-form" onSubmit=${submit}>
    <h2>This server has a key</h2>
    <p class="soft">Open the link that <code>areal-agents train</code> or <code>serve</code> has printed, or give the admin key of the proxy or the key of <code>areal-agents view</code>.</p>
    <div class="row"><input class="grow" name="key" type="password" autocomplete="current-password" aria-label="Key" autofocus />
    <button class="primary">Open</button></div>
    ${problem && html`<p class="bad" role="alert">${problem}</p>`}
  </form></main>`;
}

function Frame({ session, leave }) {
  const route = useRoute();
  const [theme, nextTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const [kind, run] = route.parts;
  useKeys({
    "?": () => setHelp((shown) => !shown),
    Escape: () => setHelp(false),
    t: nextTheme,
    u: () => (location.hash = up(route.parts)),
  });
  useEffect(() => {
    document.title = (kind === "run" ? [...route.parts.slice(2).reverse(), run] : ["runs"]).join(" · ") + " · areal-agents";
    scrollTo(0, 0);
  }, [route.parts.join("/")]);
  return html`
    <header class="top"><div class="inside">
      <a class="brand" href=${link([])}><img src="static/icon.svg" alt="" /><span>areal-agents</span></a>
      <div class="crumbs">${crumbs(route.parts).map(([text, address], i) => html`
        ${i > 0 && html`<span>/</span>`}${address ? html`<a href=${address}>${text}</a>` : html`<span>${text}</span>`}`)}</div>
      <button class="quiet" onClick=${nextTheme} title="Light or dark (t)" aria-label=${`Theme: ${theme}`}>${{ light: "☀", dark: "☾", system: "◐" }[theme]}</button>
      <button class="quiet" onClick=${() => setHelp(true)} title="Keyboard (?)" aria-label="Keyboard shortcuts">?</button>
      ${session.needs_key && html`<button class="quiet optional" onClick=${() => read("session", { method: "DELETE" }).then(leave)}>Leave</button>`}
    </div></header>
    <main>${shown(route)}</main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function shown({ parts, values }) {
  const [kind, run, what, id] = parts;
  if (kind !== "run" || !run) return html`<${RunsList} values=${values} />`;
  if (what === "step") return html`<${Step} key=${`${run}/${id}`} run=${run} step=${id} />`;
  if (what === "group") return html`<${Group} key=${`${run}/${id}`} run=${run} id=${id} values=${values} />`;
  if (what === "episode") return html`<${Episode} key=${`${run}/${id}`} run=${run} id=${id} values=${values} />`;
  if (what === "compare") return html`<${Comparison} key=${run} run=${run} values=${values} />`;
  if (what === "episodes") return html`<${Run} run=${run} tab="episodes" values=${values}><${Episodes} key=${run} run=${run} values=${values} /><//>`;
  return html`<${Run} key=${run} run=${run} tab=${what ?? "curves"} values=${values} />`;
}

function crumbs([kind, run, what, id]) {
  if (kind !== "run" || !run) return [["runs", null]];
  const found = [["runs", link([])], [run, what ? runLink(run) : null]];
  if (what === "episode") found.push(["episodes", runLink(run, "episodes")], [id, null]);
  else if (what === "group" || what === "step") found.push([`${what} ${id}`, null]);
  else if (what) found.push([what, null]);
  return found;
}

function up([kind, run, what, id]) {
  if (kind !== "run" || !what) return link([]);
  return id && what === "episode" ? runLink(run, "episodes") : runLink(run);
}

render(html`<${App} />`, document.getElementById("page"));
