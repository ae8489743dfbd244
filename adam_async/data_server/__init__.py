"""Data servers: sources of images, the order of an epoch, and leases of image groups to replicas.

A worker asks for groups ahead of need (`client.py`). `service.py` receives the question, and `questions.py`
turns it into an event of the ledger. `state.py` decides which groups the worker gets. Once all ledger
replicas have the event, `questions.py` sends the groups, which `group_producer.py` makes. Reports of finished
groups become events in the same way.

    state.py                        leases and reports: each group finished exactly once, or skipped
    epoch.py                        one epoch: queues, groups of lost replicas, early end, skipped groups
    replica_leases.py               the log of one replica's leases, from which all its workers read
    clock_targets.py                clocks in ssp and bsp, and the sync clock that all replicas reach
    lease_limits.py                 fewer groups ahead for slow replicas (stragglers)
    order.py                        the shuffle by seed and epoch, skipped images first, cut into groups

    ledger.py                       all events of leases in one order, and the state that they give
    ledger_replication.py           copies of the ledger: terms, settled entries, lost replicas
    ledger_service.py               shell of the ledger: links of ledger leader and ledger replicas
    service.py                      the data-server role: runs, epochs, effects of settled events
    questions.py                    questions and reports of workers, from request to answer; back-pressure
    question_checks.py              refusal of questions and reports that no correct peer sends

    group_producer.py               groups made ahead (prefetch); reads, decoding, transforms on a thread
    group_cache.py                  gathered blocks of groups, handed out as slices
    image_cache.py, lazy_images.py  decoded images in memory; images that stay in their files
    transforms/                     data augmentation: the recipe of transforms, and its compiled kernels
    validation_split.py             images held back for validation, and the sample of a training step
    run_memory.py                   memory of a run, checked before allocation

    dataset.py, class_names.py      checked images with labels; names and numbers of classes
    damage.py                       the policy for damaged images
    sources/                        MNIST, CIFAR-10, image folders, NumPy, CSV, Parquet, WebDataset, Ray
    staging/                        a shared source, copied by several data servers together
    client.py                       worker's side: groups ahead, reports, another server after a loss
    standalone.py                   a data host outside any cluster, which serves several clusters
    statistics.py                   counts for reports
"""
