"""UPipe context parallelism for Megatron-LM.

Importing this package imports neither torch nor Megatron. Entry points:

* ``torchrun ... -m megatron_upipe.run [script.py] <Megatron flags>``: the launcher (``integration/launcher.py``)
* ``megatron-upipe``: the command-line tool (``cli.py``)
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("megatron-upipe")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"
