"""The one exception that means: the user can mend this, and the message says how."""


class PipelineError(Exception):
    """A message for the user: the config key, its value, what to do. Shown without a traceback, exit code 2."""
