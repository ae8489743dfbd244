"""Pure: compiled kernels, of the extra `fast`.

vectors     vector instructions, for loops that are emitted instead of compiled
tiles       the two innermost loops of all products, as vectors
squares     vector code for the values under a pooling square
memory      the kernels' view of memory, and their compiler
products    dense layers and convolutions
pixels      padding and pooling
pointwise   value by value
curves      exponential, tanh and the logistic function
response_norm, local, losses   the layers of these names
updates     gradient descent in place
rules       the update rules, for several gradients at a time
batches     these rules on the shards of a parameter server
program     the interpreter: one call for many kernels
tape        the rows that it runs
compiled    the interface of a layer with such kernels
dense, conv2d, locally_connected, layers   the layers
engine      a network's passes, and its steps in place
"""

# No imports here, because numba loads slowly and would load with any file of this package; `registers` does
# not need it.
