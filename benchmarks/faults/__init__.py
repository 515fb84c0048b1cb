"""What can go wrong around a server, done to real ones: `python -m benchmarks.faults`.

tools          a server under test, clients that misbehave, and who is asked meanwhile
connections    clients that are too many, too slow, or gone
processes      signals, a killed worker, engines that fail, disks, clocks
soak           half an hour of everything, and what grows meanwhile
"""
