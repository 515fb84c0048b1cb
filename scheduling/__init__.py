"""Who runs next. Knows nothing of torch, HTTP, threads or clocks, and needs nothing but the
standard library and sortedcontainers.

inference   the nouns: Inference, Row, Iteration, and the engine's seam
errors      what can go wrong with a request
blocks      which KV blocks are free
policies    which inferences run, and who may join
scheduler   carries a policy's plans out
"""
