"""The tables of docs/settings.md:  python -m config"""

from config import features, groups

print(features.table() + "\n\n" + groups.table())
