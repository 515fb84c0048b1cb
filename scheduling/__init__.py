"""Which requests run next. Knows nothing of torch, HTTP, threads or clocks, and needs only the
standard library and sortedcontainers.

inference     the nouns: Inference, Row, Iteration, and the engine's interface
sampling      what a request wants of the engine
errors        what can go wrong with a request
policies      which inferences run, which may join, and which go first
scheduler     carries a policy's plans out
iteration     the rows of a plan, or the rule that it breaks
queue         waiting requests
memory        KV blocks; prefix_cache finds them by their content
extensions    what a scheduler calls when something happens:
  admission   requests that are refused
  ledger      what each user was served
  pauses      running rows that are not computed
"""
