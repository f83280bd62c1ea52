"""The one exception that users see."""


class UPipeError(RuntimeError):
    """A setting, flag or machine that the plug-in cannot honour.

    The message is one sentence that names the flag, the value given and the nearest legal one. Deliberately not an
    ``ImportError``: Megatron swallows those while it imports a ``--spec`` module and trains the stock model instead.
    """
