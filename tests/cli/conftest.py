"""The served toys of the server tests, for the commands that talk to them."""

from tests.server.conftest import make_live, make_toy

__all__ = ["make_live", "make_toy"]
