"""Train LLM agents with GRPO on a LoRA, from a laptop.

The public names are listed in `__init__.pyi`; each is imported when it is first used.
"""

import lazy_loader

from .shared.version import __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
