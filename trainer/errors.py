"""The error for anything a user can put right."""


class ConfigError(Exception):
    """A config, an override or an input is wrong.

    The command line prints the message alone, without a traceback, and exits with 2. The message
    names the key, the value, what is allowed and, where there is one, the fix.
    """
