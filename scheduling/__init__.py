"""Who runs next. Knows nothing of torch, HTTP, threads or clocks, and needs only the standard
library and sortedcontainers.

inference     the nouns: Inference, Row, Iteration, and the engine's interface
errors        what can go wrong with a request
scheduler     carries a policy's plans out
iteration     the rows of a plan, or the rule that it breaks
policies      which inferences run, which may join, and which go first
queue         waiting requests
ledger        what each user was served
memory        KV blocks
prefix_cache  KV blocks that are found by their content
admission     requests and users that are refused
extensions    features that the four modes do not need
"""
