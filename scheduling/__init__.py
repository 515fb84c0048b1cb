"""Who runs next. Knows nothing of torch, HTTP, threads or clocks, and needs nothing but the
standard library and sortedcontainers.

inference   the nouns: Inference, Row, Iteration, and the engine's seam
errors      what can go wrong with a request
blocks      which KV blocks are free, how often shared, and what they hold
memory      which of them an inference has, and which hold what it would compute
policies    which inferences run, and who may join
rows        what a plan comes to, or the rule that it breaks
scheduler   carries a policy's plans out
"""
