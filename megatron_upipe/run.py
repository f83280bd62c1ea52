"""``torchrun ... -m megatron_upipe.run [script.py] <Megatron flags>``: see ``integration/launcher.py``."""

import sys

from megatron_upipe.integration.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
