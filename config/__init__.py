"""Settings: which there are, and whether they fit together.

environment  the command that works, where a package is missing
reading      JSON, and texts of settings
shapes       how large a model is
left         settings that left, and what to use instead
settings     every setting, with its meaning and its limits
config       Config: all settings of a server, and what follows from them
checks       which settings do not go together
open_files   the limit of open files
flags        command line, environment and .env, and what --help shows

What `auto` means on this machine is in generate/auto.py; `build` and `parse` are handed it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from config import environment  # noqa: F401 - where a package is missing

if TYPE_CHECKING:
    from config.config import *  # noqa: F403
    from config.flags import *  # noqa: F403
    from config.left import in_todays_names as in_todays_names
    from config.reading import read_key as read_key
    from config.settings import *  # noqa: F403
    from scheduling.policies import MODES as MODES
else:

    def __getattr__(name: str) -> Any:
        """Return a name of these modules, with the first of which pydantic is loaded: model.py and
        what a browser runs need `shapes` and `reading` alone.
        """
        modules = "settings", "config", "flags", "left", "reading", "checks", "shapes"
        for module in modules if name not in modules and name[0] != "_" else ():
            if name in (known := vars(import_module(f"config.{module}"))):
                return known[name]
        raise AttributeError(f"module 'config' has no attribute {name!r}")
