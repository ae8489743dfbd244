"""Data servers: sources of images, the order of an epoch, and leases of image groups to replicas.

A worker asks the *dealer*, one of the data servers, for groups ahead of need (`client.py`). `service.py`
receives the question, and `questions.py` turns it into an event. `state.py` decides which groups the worker
gets, and `questions.py` sends the groups' numbers. Reports of finished groups become events in the same way.
The worker reads the groups' images from any data server (`group_reader.py`). There `group_producer.py` makes
the images, and `questions.py` sends them.

    state.py                        leases and reports: each group finished exactly once, or skipped
    epoch.py                        one epoch: the shuffle by seed and epoch, skipped images first, cut into
                                    groups; queues, groups of lost replicas, early end, skipped groups
    replica_leases.py               the log of one replica's leases, from which all its workers read;
                                    fewer groups ahead for slow replicas (stragglers); clocks in ssp and
                                    bsp, and the sync clock that all replicas reach

    dealer.py                       shell of the state: the map, epochs, and the sets that settle leases, from
                                    the primaries of all bundles
    service.py                      the data-server role: runs, epochs, effects of events
    questions.py                    questions for leases and images, and reports of workers, from request
                                    to answer; back-pressure

    group_producer.py               groups made ahead (prefetch); reads, decoding, transforms on a thread;
                                    memory of a run, checked before allocation
    image_cache.py                  decoded images in memory; gathered blocks of groups, handed out as slices
    transforms/                     data augmentation: the recipe of transforms, and its compiled kernels

    dataset.py, class_names.py      checked images with labels; images in files; images held back for
                                    validation, and the sample of a training step; names of classes;
                                    the policy for damaged images
    sources/                        MNIST, CIFAR-10, image folders, NumPy, CSV, Parquet, WebDataset, Ray
    staging/                        a shared source, copied by several data servers together
    client.py                       worker's side: leases and groups ahead, half a second of work from a pool,
                                    reports
    group_reader.py                 worker's side: images from one data server, or another after a loss;
                                    limits of groups, by which a worker refuses an answer
    standalone.py                   a data host outside any cluster, which serves several clusters
"""
