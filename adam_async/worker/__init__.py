"""The model worker: trains one replica of the model, or one part of a replica, on compute threads.

`run_session.py` takes leased groups from the data client and admits them to the dataflow engine; in ssp and
bsp an admission gate decides when. A compute thread trains each group (`training.py`). On the event loop,
`stepper.py` collects groups into steps, `pusher.py` sends the steps, and `puller.py` installs the
returned values. Once the servers have acknowledged the push of a group, the worker reports the group to the
data server. In a run in place the compute thread changes the servers' memory, and reports of steps replace
the pushes.

Files, in reading order:

    run_session.py                      one run on this worker: its objects, the admission of groups, events
    service.py                          the role: joins a cluster, and trains one run after the other

    copy_mode.py                        modes on a copy of the values, of a model or of one part of it
    training.py                         one group on a compute thread, on a copy or in place; its graph; what
                                        the modes get
    push_plan.py                        deltas or factors per tensor, messages per server, push buffers
    gradient_clipping.py                clipping by the norm, layer-wise rate control
    stepper.py                          groups summed into steps; in ssp and bsp in order, behind a gate;
                                        arithmetic of clocks: the step of a group, the values that it reads
    pusher.py                           pushes of a step, with the versions for staleness; ticks; the reads of
                                        each group in a recorded run
    puller.py                           the copy, read without locks; pulls, installed whole by tensor

    in_place_mode.py                    mode in place: the rule applied to the servers' memory, no locks
    mapped_memory.py                    that memory, in another process than the server

    partition_trainer.py                segments of a part of a model, and their graph, which waits for blocks
    peer_workers.py                     links among the workers of a replica: activations, error gradients
    reliable_stream.py                  numbered blocks: repeated on a new link, accepted exactly once

    kernel_change.py                    compiled kernels, compiled during training in a child process
"""
