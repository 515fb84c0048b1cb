/* The worker: Pyodide with the project's own modules. It runs the state that the page wants last,
   and leaves an older one between two variants. The grid's rows come when nothing else is wanted. */

import {loadPyodide} from "./pyodide.mjs";

let ask = null, wanted = null, running = false, learnt = null;

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({indexURL: "./"}),
    fetch("app.zip").then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", {extractDir: "/home/pyodide"});
  const answer = python.runPython(`
import json
from playground import run

settings = json.load(open("settings.json"))
lambda words: json.dumps(run.answer(json.loads(words), settings))
`);
  ask = (...words) => JSON.parse(answer(JSON.stringify(words)));
  go();
}

async function go() {
  if (running || !ask) return;
  running = true;
  while (wanted) {
    const next = wanted;
    wanted = null;
    await run(next);
  }
  running = false;
}

async function run({id, state, code, runs, shown}) {
  const say = (kind, more) => postMessage({kind, id, ...more}), began = performance.now();
  // messages are taken meanwhile; true if there is a newer state
  const superseded = () => new Promise((resolve) => setTimeout(() => resolve(wanted !== null)));
  if (code !== null && code !== learnt) {
    say("begun", {own: true});
    say("learnt", ask("learn", learnt = code));
  }
  say("facts", ask("facts", state));
  for (const [index, variant] of state.variants.entries()) {
    if (!runs[index]) continue;
    say("begun", {own: variant.includes("yours.py")});
    const result = ask("served", variant, state);
    say("served", {index, result});
    if (result.error) runs[index] = false;
    if (await superseded()) return;
  }
  say("done", {ms: performance.now() - began});
  await new Promise((resolve) => setTimeout(resolve, 150));
  const histories = [];
  for (const index of shown.filter((i) => runs[i])) {
    if (await superseded()) return;
    histories.push([state.variants[index], ask("history", state.variants[index], state)]);
  }
  say("rows", {histories});
}

addEventListener("message", ({data}) => {
  if (data.trace) return postMessage({kind: "trace", text: ask("trace", data.trace)});
  if (data.again) learnt = null; // take the reader's text once more, even if it is the same
  else wanted = data;
  go();
});

start().catch((error) => postMessage({kind: "failed", message: String(error)}));
