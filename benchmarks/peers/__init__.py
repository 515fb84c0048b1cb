"""Other engines on benchmarks.burst's requests: what somebody would run instead of ours. Each is a
script that runs in an environment of its own and knows nothing of ours but the workload.
"""
