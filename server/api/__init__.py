"""Requests, answers, events and errors of the HTTP interface, as plain data and functions. Knows no
HTTP server: `app` and `server.http` serve it with Flask and gunicorn, `server.replicas` on Ray.
"""
