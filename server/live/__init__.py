"""The rows of a server as a page: what each iteration computes, and for which request.

history    rows × iterations in the page's format (docs/live.md), written and parsed
observer   history of a server while its page is open, or of a whole run
panel      routes of the page; `made_load` makes the load that a page starts
page       page.html, style.css and the scripts; or one file of them with saved runs in it
"""

from config import environment  # noqa: F401 - where a package is missing
