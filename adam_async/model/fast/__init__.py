"""Pure: compiled kernels, of the extra `fast`.

A layer names its kernels and their fields. `engine.py` joins neighbouring layers' steps into a tape
(`tape.py`), and `program.py` runs the tape in one call without Python's interpreter lock. The update rules of
parameter servers need no tape: `batches.py` calls their kernels.

    engine.py                       start here: a network's passes, and its steps in place
    program.py                      the interpreter: one call for many kernels; the numbers of all kernels
    tape.py                         the rows that it runs; a ReLU is fused into the kernel before it; the
                                    interface of a layer with such kernels
    compiling.py                    a process that compiles kernels while training runs without them
Layers:
    sliding.py, layers.py           the layers; the table of all layers with compiled kernels
Kernels:
    memory.py                       the kernels' view of memory, and their compiler
    products.py                     dense layers and convolutions
    pixels.py                       padding and pooling
    curves.py                       value by value: sums, ReLU, exponential, tanh and the logistic function
    layer_kernels.py                local response normalisation, locally connected layer, losses
    updates.py                      gradient descent in place
    rules.py                        the update rules, for several gradients at a time
    batches.py                      these rules on the shards of a parameter server
Vector code (LLVM):
    vectors.py                      vector instructions, for loops that are emitted instead of compiled;
                                    the vector registers, which decide the shapes of loops
    tiles.py                        the two innermost loops of all products, as vectors
    sums.py                         sums of scaled vectors, and dot products with the errors of their sums
    squares.py                      vector code for the values under a pooling square
"""

# No imports here, because numba loads slowly and would load with any file of this package.
