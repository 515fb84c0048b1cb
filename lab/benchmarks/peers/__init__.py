"""Other engines on lab.benchmarks.burst's requests: alternatives to ours, beside which `python -m
studies peers` runs them. `engines` and `checkpoint` run in environments of their own and know
nothing of ours but the workload.
"""
