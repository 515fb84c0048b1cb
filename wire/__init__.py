"""The language of every front end: requests read from bodies, answers, events and errors, as plain
functions. Knows no HTTP server: `routes` puts it behind Flask, `deploy` behind Ray Serve.
"""
