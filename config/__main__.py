"""The table of docs/settings.md:  python -m config"""

from config.flags import table

print(table())
