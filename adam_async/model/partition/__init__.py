"""Pure: a model cut over the workers of a replica (model parallelism): plans, predicted costs, parts.

`planner.py` makes a plan with the predicted cost of each. `Layout` (`plan.py`) derives from the plan the rows
that each worker reads, computes, sends and receives. `network.py` assembles each worker's part, with layers
that exchange rows at its borders.

    plan.py                  start here: `PartitionPlan`, the blocks of each worker; `Layout`, and the tensors
                             that cross between two workers
    planner.py               plans of two kinds: every layer cut over all workers (vertical), with the choice
                             to send or to recompute a halo; or consecutive layers for each worker
                             predicted rate of a plan: its slowest worker or link; latency of one group
    network.py               `Partition`, the part of one worker; its segments, the steps between two waits
                             departures and arrivals: layers that copy rows and error gradients to other parts
"""
