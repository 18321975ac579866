"""The errors that end a run with a message alone."""


class ConfigError(Exception):
    """A config, an override or an input is wrong.

    The command line prints the message alone, without a traceback, and exits with 2. The message
    names the key, the value, what is allowed and, where there is one, the fix.
    """


class RunError(Exception):
    """A run cannot go on, for a reason that is no fault of the code: a loss that is no number, a full disk.

    The command line prints the message alone and exits with 1. The last good checkpoint is in place.
    """
