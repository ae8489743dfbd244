"""Staging: several data servers copy a slow shared source together; only one of them reads each file there.

All servers have the same lists of files and servers. Each server reads its own files from the source, and
copies the other files from its peers, round by round. `plan.py` decides where a file comes from, `service.py`
gets and sends it, and `files.py` writes it to the copy. The data server then loads its images from the copy.

    plan.py                  start here: owners of files, rounds, substitutes for lost servers; pure
    service.py               `Stager`, the role: tasks that get files, answers to other servers, counts
    peer.py                  one other server: requests with deadlines, loss after a silence
    files.py                 the list of files; reads of a source that may hang; durable files of the copy
"""
