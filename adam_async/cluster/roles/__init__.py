"""One file per role, with the function that runs the role as an `async with` block.

The command line, child processes and programs that start single roles use these functions. A role serves run
after run until its block ends. A process of one role imports only the file of this role, because imports of
the other files would make its start 50 % longer.
"""
