from expanding import expanded  # noqa: F401
