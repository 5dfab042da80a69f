"""The mutations of files lie beside the other readers' tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "data" / "hostile"))
