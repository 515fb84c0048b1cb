"""The rows of a server as a page: what each iteration computes, and for which request.

Knows the scheduler's nouns, and no HTTP server.

history    rows × iterations in the page's format (docs/live.md); reading reads it
observer   keeps the history of a server while its page is open, or of a whole run
panel      the page's routes; made_load, the load that it asks for
page       one HTML file, which a server serves and saved runs are put into
timeline   the same for Perfetto and other readers of Chrome's trace events
saved      histories of runs that were recorded or simulated: python -m live RUN
"""
