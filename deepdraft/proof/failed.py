"""How a check says that it does not hold."""


class Failed(Exception):
    """A check did not hold; the message says where."""
