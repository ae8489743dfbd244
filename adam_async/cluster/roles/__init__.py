"""One file per role, with the function that runs the role as an `async with` block.

The command line, child processes and programs that start single roles use these functions. A role serves run
after run until its block ends. A process of one role imports only the file of this role: with those of the
others its start would take half as long again.
"""
