"""A small byte-level Mixture-of-Experts language model: what examples/train_lm.py trains and
examples/generate.py decodes with.

    corpus      real text, cut into domains, batches and validation windows
    model       the decoder, with ferry.torch.MoELayer in each block
    training    a step over any split of the ranks, evaluation, checkpoints, the log
    recording   the routing of a trained model as a trace
"""
