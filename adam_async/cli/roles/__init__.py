"""The role commands: one role in this process, until it is ended.

A role prints one line, with its address and the next command for a cluster started by hand. A controller also
logs changes of its group. A signal ends a role; a role of a parent process (`--supervised`) also ends when
its stdin ends.

A process runs one role: each command has a file, which imports no other role.

    serving.py                   start here: runs any role until its end; token, parent's orders, printed line
    controller.py                `controller`: alone, or one of a group with `--peers`
    parameter_server.py          `ps`: a parameter server
    data_server.py               `data`: a data server, or a standalone one; `--stage`: a copy of its source
    worker.py                    `worker`: a model worker; its threads, and the user code that it may import
"""
