"""L-BFGS on a store: vectors and history stay on the servers, and a coordinator holds numbers only.

`optimizer.py` makes the moves of a `Minimiser` (`minimiser.py`): sums of vectors, inner products, and
evaluations of the gradient. An evaluation is cut into pieces, which the `Dealer` deals out to the workers.
Each worker pushes its gradients into a vector of the store when its turn comes.

    optimizer.py        start here: `LBFGS`, with `minimise` for the coordinator and `assist` for workers in
                        other processes; the record, with which another coordinator goes on
    minimiser.py        the state machine: moves and their answers, history, direction, restarts
    line_search.py      steps that fulfil the strong Wolfe conditions
    deal.py             the pieces of an evaluation: order, turns, backups
    dealer.py           the questions of the workers
    worker.py           the work on pieces: pull, compute, push
    image_loss.py       the loss of a network or of a step, as an objective
"""
