"""The playground: the scheduler and the simulator in a browser, on a page that needs no server.

run        a state of the page in, what its variants did out; the browser's worker calls it
build      the folder of static files
"""

from config import environment  # noqa: F401 - where a package is missing
