"""The reference decoder of a `config.json`, made of the blocks of `shardwright.layers`.

Plans name the lines of this folder as lines of the model. `sizes` reads a configuration. `decoder`
and `latent` are the model.
"""
