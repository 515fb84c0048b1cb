"""What the tests share. Each room's tests lie in a folder of its name, with what they alone share;
those of the laboratory in lab/tests.

plugin      fixtures of all; no handler thread lives on; a test marked `alone` has the machine
virtual     scheduler and policies in virtual time; policies and orders drawn by hypothesis
contract    what every policy and order keeps, and ./test.sh --policy
oracle      a small model, engines of several paths on it, and the texts that they must have
servers     servers as processes or in this one, and what waits for them
stub        a server of OpenAI's API whose instants are known, for the client
programs    the project's programs in this process
counts      how many examples a property is tried on, and cases for --all alone
mutations   a program that breaks the code, and counts how often the tests notice
"""

from config import environment  # noqa: F401 - where a package is missing
