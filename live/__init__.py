"""See it: which row computed what for whom, iteration by iteration.

Knows the scheduler's nouns, and no HTTP.

history    what there is to see, as the page and files tell it (docs/live.md)
observer   keeps it of a server while somebody looks
page       one HTML file, which a server serves and a saved run is put into
timeline   the same for Perfetto and other readers of Chrome's trace events
"""
