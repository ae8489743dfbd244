"""Public interface of stores: named arrays on parameter servers, and the work of one client of a store.

`ParameterStore` hands each call to a `StoreLink`. The link makes checked messages (`pushing.py`) by a cached
plan (`layout.py`), and sends them in the order of the calls through the `ParameterClient` of the room
`parameter_server`. Collectors turn the answers into arrays with versions, or into the outcome of a push.

    store.py                      start here: `ParameterStore`, with `open`, `pull`, `push`, `tick`
    sync.py                       the same methods without `await`; one thread for all stores of a process
    wish.py, arrays.py, rules.py  arguments of `open`, checked: consistency (asp, ssp, bsp), arrays, update
                                  rules; checks of gradients and factors
    joining.py, restoring.py      the opening: the client finds or creates the store, loads its first values,
                                  perhaps from the servers' disks, and gets a place among the clients
    link.py                       one client from its join to its end: pushes, pulls, clocks, read versions
    layout.py                     plan of the messages: shards of one server and one family each
    pushing.py, pulling.py        messages of a push; collection of the answers to a push or a pull
    call_queue.py                 order of the calls, and back-pressure: a push waits for acknowledgements
    values.py                     results: values with their versions, refused parts of a push
    survey.py                     all stores of a cluster: list, details with staleness, deletion
    local_servers.py              a controller and a server in the caller's loop, for the address ``local``
"""
