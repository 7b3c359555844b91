"""Settings of the text tests."""

from hypothesis import settings

# No deadline: the machine may be busy. No example database: nothing is written into the tree.
settings.register_profile("text", deadline=None, database=None)
settings.load_profile("text")
