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

pydantic is loaded with `settings`: model.py and what a browser runs need `shapes` and `reading`
alone. What `auto` means on this machine is in generate/auto.py; `flags` is handed it.
"""

from config import environment  # noqa: F401 - where a package is missing
