"""One validated Config, and how it comes about.

settings   every setting, with its meaning and its limits
tables     those among them that are fields of policies
checks     what does not fit together
resolve    what `auto` means on this machine
keys       who may ask, and by which name
flags      command line, environment and .env
"""

from config.flags import Parser, add_settings, build, from_environment, parse, refuse_unknown
from config.keys import read_key
from config.settings import (
    DOOMED_FILES,
    END_S,
    HANDOFF,
    MAX_BODY_BYTES,
    ONLY_OVER_HTTP,
    SPARE_FILES,
    Config,
    ConfigError,
)
from config.tables import ONLY_IN, flag, has_effect, meaningful
from scheduling.policies import MODES

__all__ = [
    "DOOMED_FILES",
    "END_S",
    "HANDOFF",
    "MAX_BODY_BYTES",
    "MODES",
    "ONLY_IN",
    "ONLY_OVER_HTTP",
    "SPARE_FILES",
    "Config",
    "ConfigError",
    "Parser",
    "add_settings",
    "build",
    "flag",
    "from_environment",
    "has_effect",
    "meaningful",
    "parse",
    "read_key",
    "refuse_unknown",
]
