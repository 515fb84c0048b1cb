"""The scheduler: which requests run next. Knows no torch, HTTP, threads or clocks, and needs only
the standard library and sortedcontainers.

inference     the nouns: Inference, Row, Iteration, and the engine's interface
interruptions preemptions and pauses of an inference
latency       where its time goes, and its neighbours
sampling      settings of sampling, and log-probabilities
errors        errors that a request can end with
policies      which inferences run, which may join, and which go first
scheduler     carries a policy's plans out
iteration     from a plan to rows, or an error that names the rule it breaks
repetition    rows without a plan, where a policy goes on with what runs
padding       tokens that an engine computes for no request
queue         waiting requests
memory        KV blocks; prefix_cache finds them by their content
extensions    features attached to the scheduler, called when something happens:
  admission   requests that are refused
  shedding    requests with limits on their latency
  adapters    LoRA adapters in the slots of the engine
  ledger      service that each user has had
  history     what rules remember of the iterations so far
  pauses      running rows that are not computed
"""
