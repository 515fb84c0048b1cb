"""Who runs next. Knows nothing of torch, HTTP, threads or clocks, and needs nothing but the
standard library and sortedcontainers.

inference   the nouns: Inference, Row, Iteration, and the engine's seam
errors      what can go wrong with a request
blocks      which KV blocks are free, how often shared, and what they hold
memory      which of them an inference has, and which hold what it would compute
policies    which inferences run, who may join, and who goes first
door        what is refused when it comes: queue policies, limits of users
lobby       who waits, with what their order goes by:
  queue       by arrival and by key
  lengths     how long an answer is expected to be
  ledger      what each user was served
pauses      which of those that run are computed
outbox      answers that wait for earlier ones
rows        what a plan comes to, or the rule that it breaks
scheduler   carries a policy's plans out
timers, totals   what falls due when; what was seen since the start
recording   what a scheduler was called with, and what came of it
replay      the same calls once more, and what differs
"""
