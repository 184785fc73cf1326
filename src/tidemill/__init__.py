"""Tidemill: model, serving engine, forkable sandboxes and verified reinforcement learning in one package.

Rooms import in one direction (docs/architecture.md):
core < kernels < parallel < model < (engine | sandbox) < agent < train < cluster < (cli | web).
"""

__version__ = "0.1.0"
