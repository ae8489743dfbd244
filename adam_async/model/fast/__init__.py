"""Pure: compiled kernels, of the extra `fast`. Nothing is imported here: importing numba takes a while.

tiles       the two innermost loops of all products, as vectors
memory      how kernels see memory, and how they are compiled
products    dense layers and convolutions
pixels      padding and pooling
pointwise   value by value; the softmax loss
updates     gradient descent where the weights are
program     the interpreter: one call for many kernels
tape        the rows it works off
compiled    what a layer with such kernels offers, and the layers: dense, conv2d, layers
engine      a network's passes
"""
