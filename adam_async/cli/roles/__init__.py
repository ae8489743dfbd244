"""The role commands: one role in this process, until it is ended.

A role prints one line, with its address and the next command for a cluster started by hand; a controller also
logs changes of its group. A signal ends a role; a role of a parent process (`--supervised`) also ends at the
end of its stdin.

A process runs one role: each command has a file, which imports no other role.
"""
