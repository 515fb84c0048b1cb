/* The worker: Pyodide with the project's own modules. It runs what the page wants last; a state that
   is superseded while a variant runs is left after that variant. */

import {loadPyodide} from "./pyodide.mjs";

let wanted = null, running = false, learnt = null;
let served, learn, facts; // of Python

const parsed = (proxy) => JSON.parse(proxy);

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({indexURL: "./"}),
    fetch("app.zip").then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", {extractDir: "/home/pyodide"});
  python.runPython(`
import json
from playground import run

with open("settings.json") as file:
    settings = json.load(file)


def served(variant, state, grid):
    return json.dumps(run.served(variant, json.loads(state), settings, grid))


def learn(code):
    return json.dumps(run.learn(code))


def facts(state):
    state = json.loads(state)
    return json.dumps({
        "command": run.command(state), "trace": run.jsonl(state),
        "requests": [[r.at, len(r.prompt_ids), r.num_tokens] for r in run.trace(state)],
    })
`);
  served = python.globals.get("served");
  learn = python.globals.get("learn");
  facts = python.globals.get("facts");
  postMessage({kind: "ready"});
  go();
}

async function go() {
  if (running || !served) return;
  running = true;
  while (wanted) {
    const {id, state, code, runs, shown} = wanted, text = JSON.stringify(state), began = performance.now();
    wanted = null;
    if (code !== null && code !== learnt) {
      learnt = code;
      postMessage({kind: "learnt", id, ...parsed(learn(code))});
    }
    postMessage({kind: "facts", id, ...parsed(facts(text))});
    for (const [index, variant] of state.variants.entries()) {
      if (wanted) break;
      if (!runs[index]) continue;
      postMessage({kind: "begun", id, index});
      const result = parsed(served(variant, text, shown.includes(index)));
      postMessage({kind: "served", id, index, result});
      await new Promise((resolve) => setTimeout(resolve)); // messages are taken meanwhile
    }
    if (!wanted) postMessage({kind: "done", id, ms: performance.now() - began});
  }
  running = false;
}

addEventListener("message", ({data}) => {
  if (data) wanted = data;
  else learnt = null; // load the reader's text again, even if it is the same
  go();
});

start().catch((error) => postMessage({kind: "failed", message: String(error)}));
