"""The playground: the scheduler and the simulator in a browser, on a page that needs no server.

worker     a state of the page in, what its variants did out; worker.js calls it
build      the folder of static files
"""

from config import environment  # noqa: F401 - where a package is missing
