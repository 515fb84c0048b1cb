"""One validated Config, and how it comes about, from the first that is read to the last:

left       flags and settings that left, and what to use in their place
tables     settings that are fields of modes and orders
keys       API keys and their users
adapters   LoRA adapters in folders, or random ones
pool       the size of the KV cache, with its unit
settings   every setting, with its meaning and its limits
features   which of them go together
resolve    what `auto` means on this machine
config     Config: settings that fit together, and what follows from them
orders     what each order of the waiting requests needs
groups     settings by what a user wants to do
help       parsers of command lines, and what --help shows
flags      command line, environment and .env
ports      whether the address is free
"""

from config import environment  # noqa: F401 - where a package is missing
from config.config import Config
from config.flags import add_settings, build, from_environment, parse, refuse_unknown
from config.help import Parser
from config.keys import read_key
from config.settings import (
    BOOT_ERROR,
    DOOMED_FILES,
    END_S,
    HANDOFF,
    MAX_BODY_BYTES,
    NOT_SIMULATED,
    ONLY_OVER_HTTP,
    SPARE_FILES,
    ConfigError,
)
from config.tables import ONLY_IN, flag, has_effect, meaningful
from scheduling.policies import MODES

__all__ = [
    "BOOT_ERROR", "DOOMED_FILES", "END_S", "HANDOFF", "MAX_BODY_BYTES", "MODES", "NOT_SIMULATED",
    "ONLY_IN",
    "ONLY_OVER_HTTP", "SPARE_FILES", "Config", "ConfigError", "Parser", "add_settings", "build",
    "flag", "from_environment", "has_effect", "meaningful", "parse", "read_key", "refuse_unknown",
]  # fmt: skip
