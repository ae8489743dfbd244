"""The roles that stores need too, each with the function that runs it as an `async with` block.

The command line, child processes and programs that start single roles use these functions; the commands of
data servers and workers open their roles themselves. A role serves run after run until its block ends. A
process with one role imports only this role's file, because importing the other files would make its start 50
% longer.

    place.py                     start here: the parameters of any role, and the errors of its address
    controller.py                a controller, alone or of a group
    parameter_server.py          a parameter server, in memory or with a folder on disk
"""
