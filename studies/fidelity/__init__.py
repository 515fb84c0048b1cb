"""The simulator held against real servers, on traces that its costs were not fitted to.

tasks    what is asked, and in which order
running  a task by a real server, and by a simulated one
judging  errors, their intervals, and whether they meet their targets
pages    tables and a figure of them
"""
