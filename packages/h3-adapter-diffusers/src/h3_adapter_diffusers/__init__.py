"""The h3 contracts behind a Diffusers MiniMax-H3, for training.

`install_h3_training(model)` binds a real `MiniMaxH3Transformer3DModel`; `training.replay` evaluates a
rollout's recorded step on it; `cps` is the sampler's transition and its density. Names are imported from
their modules, so that the transition and the packing need neither Diffusers nor PEFT.
"""

__version__ = "0.1.0"
