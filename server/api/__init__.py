"""Requests, answers, events and errors of the HTTP interface, as plain data and functions. Knows no
HTTP server: `routes` serves it with Flask, and `deploy` with FastAPI on Ray Serve.
"""
