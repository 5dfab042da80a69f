"""`python -m launch COMMAND ...` is `vlp COMMAND ...`."""

import sys

from launch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
