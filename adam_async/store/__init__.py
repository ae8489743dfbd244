"""Public interface of stores: named arrays on parameter servers, and what one client of a store does.

A push of `ParameterStore` checks and gathers the arrays (`values.py`) by a cached plan (`layout.py`). A
`Call` takes its turn and sends its messages on the client's sessions with the bundles (`client/session.py`).
A call turns the answers into arrays with versions, or into an outcome.

    store.py                      start here: `ParameterStore`, with `open`, `pull`, `push`, `tick`
    sync.py                       the same methods without `await`; one thread for all stores of a process
    arguments.py, arrays.py       arguments of `open`, checked: consistency (asp, ssp, bsp), arrays, rules;
                                  checks of gradients and factors
    joining.py                    the opening: the client finds or creates the store, loads its first values,
                                  perhaps from the servers' disks, and gets a place among the clients
    opening.py                    a store before `async with`; one client from its join to its end; for the
                                  address ``local``, a controller and a server in the caller's loop
    calls.py                      calls of one client: turns, messages, answers; back-pressure, clocks
    layout.py                     plan of the messages: shards of one server and one family each
    vectors.py                    vectors: commands by name, their step to all servers, and its answer
    values.py                     values of calls: messages of a push, from checked arrays by name; results;
                                  arrays for gradients, in memory that servers of this host read
    pins.py                       states of a store under names, on the disks of its servers
    saved_file.py                 a store in a file: values, and on request the state of the rules
    survey.py                     all stores of a cluster: list, details with staleness, deletion
"""
