"""What is told of every iteration and answer: statistics, Prometheus, the request log."""
