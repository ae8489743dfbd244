"""Pure: compiled kernels, of the extra `fast`. Nothing is imported here: importing numba takes a while.

vectors     vector instructions, for loops that are emitted instead of compiled
tiles       the two innermost loops of all products, as vectors
squares     what pooling does with the vectors under a square
memory      how kernels see memory, and how they are compiled
products    dense layers and convolutions
pixels      padding and pooling
pointwise   value by value
curves      exponential, tanh and the logistic function
response_norm, local, losses   the layers of these names
updates     gradient descent where the weights are
rules       the update rules, for several gradients at a time
batches     these rules on the shards of a parameter server
program     the interpreter: one call for many kernels
tape        the rows it works off
compiled    what a layer with such kernels offers
dense, conv2d, locally_connected, layers   the layers
engine      a network's passes, and its steps in place
joint       those of all parts of a cut network in one process
"""
