"""What a user has to mend."""


class UserError(Exception):
    """Bad input: the message names the option or file, the value, the rule and a fix. The exit code is 2."""
