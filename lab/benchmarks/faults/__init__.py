"""Faults around a server, done to real ones: `python -m lab.benchmarks.faults`.

tools          a server under test, clients of it, and a client in the background
connections    clients that are too many, too slow, or gone
processes      signals, a killed worker, engines that fail, disks, clocks
"""
