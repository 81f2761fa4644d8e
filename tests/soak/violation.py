"""What ends the kill test."""


class Violation(Exception):
    """The product has not done what it promises."""
