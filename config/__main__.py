"""The tables of docs/settings.md:  python -m config"""

from config.groups import table

print(table())
