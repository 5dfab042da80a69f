"""`vlp info`: what is installed, where, and what it computes on."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata

PACKAGES = (
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "deepspeed", "accelerate"),
    *("webdataset", "pycocoevalcap", "pycocotools", "gradio"),
)
OWN = ("vlp", "data_tools", "evaluation", "launch", "configs")


def info() -> None:
    """Print versions, devices and the locations of packages."""
    import torch

    import vlp

    print(f"vlp {vlp.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("\nversions")
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        print(f"  {name:14} {version}")
    print("\ndevices")
    print(f"  {'cpu':14} {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        print(f"  {f'cuda:{index}':14} {properties.name}, {memory:.0f} GiB")
    print("\nlocations")
    for name in OWN:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        print(f"  {name:14} {places[0] if places else 'not installed'}")
