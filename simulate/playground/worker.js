/* The worker: Pyodide with the project's own modules. It runs the state that the page wants last,
   and leaves an older one between two variants.
   The build writes BYTES, which it fetches, above. */

import {loadPyodide} from "./pyodide.mjs";

let ask = null, wanted = null, running = false, learnt = null;
let turn = 0; // the variant that is next: while a slider moves, each has its turn

let loaded = 0; // of BYTES
const fetched = fetch;
self.fetch = async (...words) => { // Pyodide's, too
  const answer = await fetched(...words);
  const counted = new TransformStream({transform(chunk, out) {
    loaded += chunk.length;
    postMessage({kind: "loading", percent: Math.floor(100 * loaded / BYTES)});
    out.enqueue(chunk);
  }});
  return new Response(answer.body.pipeThrough(counted), answer);
};

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide({indexURL: "./"}),
    fetch("app.zip").then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", {extractDir: "/home/pyodide"});
  const answer = python.runPython(`
import json
from simulate.playground import worker

settings = json.load(open("settings.json"))
lambda words: json.dumps(worker.answer(json.loads(words), settings))
`);
  ask = (...words) => JSON.parse(answer(JSON.stringify(words)));
  go();
}

/** Measures of a variant, and what its charts show. requests: when each is sent, and its tokens. */
function measured({answers, token_times: encoded, rows}, requests) {
  const times = new Float64Array(Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0)).buffer);
  const points = [], firsts = [], gaps = [];
  let k = 0, last = 0;
  for (const [id, first, , ended] of answers) {
    const [at, n] = requests[id];
    points.push([n, ended - at]);
    firsts.push(first - at);
    for (let i = k + 1; i < k + n; i++) gaps.push(times[i] - times[i - 1]);
    k += n;
    last = Math.max(last, ended);
  }
  const sorted = (values) => Float64Array.from(values).sort();
  const rank = (values, part) => values[Math.min(values.length - 1, Math.floor(part * values.length))];
  const latencies = sorted(points.map(([, latency]) => latency)), shares = Object.values(rows);
  const shapes = {points, firsts: sorted(firsts), gaps: sorted(gaps), rows};
  return {
    answers, ...shapes, throughput: k / (last - requests[0][0]),
    mean: latencies.reduce((a, b) => a + b) / latencies.length, p99: rank(latencies, 0.99),
    ttft: rank(shapes.firsts, 0.99), gap: rank(shapes.gaps, 0.99),
    useful: rows.live / shares.reduce((a, b) => a + b),
  };
}

async function go() {
  if (running || !ask) return;
  running = true;
  while (wanted) {
    const next = wanted;
    wanted = null;
    try {
      await run(next);
    } catch (error) { // its last line, where Python gives all calls
      postMessage({kind: "broke", message: String(error.message).trim().split("\n").at(-1)});
    }
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
  const {command, requests} = ask("facts", state);
  say("facts", {command});
  const histories = [];
  for (const _ of state.variants) {
    const index = turn++ % state.variants.length, variant = state.variants[index];
    if (!runs[index]) continue;
    say("begun", {own: variant.includes("yours.py")});
    const result = ask("served", variant, state, shown.includes(index));
    say("served", {index, variant, result: result.error ? result : measured(result, requests)});
    if (result.history) histories[index] = [variant, result.history];
    if (await superseded()) return;
  }
  say("done", {ms: performance.now() - began});
  say("rows", {histories: histories.filter(Boolean)});
}

addEventListener("message", ({data}) => {
  if (data.trace) return postMessage({kind: "trace", text: ask("trace", data.trace)});
  if (data.again) learnt = null; // take the reader's text once more, even if it is the same
  else wanted = data;
  go();
});

start().catch((error) => postMessage({kind: "failed", message: String(error)}));
