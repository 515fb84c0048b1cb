"""One's own vLLM, by a recording of it: costs, traffic and settings of a simulation, and how well
that foresees what was measured.

vllm_recorder  what a vLLM loads that writes the file; it needs nothing of ours
vllm_order     the same with an order of ours as its waiting queue; needs `scheduling` alone
recording      the file: settings, requests and iterations
history        the same as the live page shows it
costs          lines through the times of its iterations
traffic        its requests as a trace, as they came or resampled
agreement      its schedule and ours, iteration by iteration
pace           the machine's speed at each time
foreseen       measured and simulated, side by side
"""
