"""Programs that are started with the shim: ``gemma4-compat run``, ``enable`` and ``disable``."""
