"""`main.py`, whose engines on Ray are `benchmarks.cluster.repeatable_engine`."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from espalier.sampling.ray_engines import RayEngines

    RayEngines.program = "benchmarks.cluster.repeatable_engine"
    runpy.run_path(str(ROOT / "main.py"), run_name="__main__")
