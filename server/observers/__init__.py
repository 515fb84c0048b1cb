"""Observers of every iteration and answer: statistics, Prometheus, request log, recording."""
