"""Helpers beside this file, and those of data tools, can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
