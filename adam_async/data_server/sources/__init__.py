"""Sources of images with labels: names, files, folders and Python objects become a `Dataset`.

`kinds.py` looks at the name, or at the names in a folder, and `datasets.py` calls the loader of that kind. A
loader of encoded images collects samples, and `samples.py` decodes all of them into memory. Training images
of folders and tar files may stay in their files; the data server then decodes them on demand. Programs with
images in Python objects or in Ray call `objects.py` or `ray_data.py`.

    datasets.py                       start here: `load`, and all kinds of sources; folders of images by class
    kinds.py                          names of sources; kind and files, by the names in a folder alone
    samples.py                        encoded images, decoded into one size; labels, counts, damage
    pictures.py                       one encoded image to pixels (Pillow): EXIF, scaling, cropping
    splits.py                         training set and test set, by names of files or by a hash
Encoded images:
    shards.py                         WebDataset: tar files
    parquet.py                        Parquet files, such as those of Hugging Face
    tables.py                         CSV: pixels, or paths of image files
Arrays:
    published_sets.py, idx.py         MNIST, Fashion-MNIST and CIFAR-10; the IDX format; downloads with
                                      checksum and mirrors into the cache of the user
    numpy_files.py                    NumPy archives with the keys of Keras; NumPy files, mapped into memory
    objects.py                        Python objects with items, and asynchronous iterators
    ray_data.py                       rows of a `ray.data.Dataset`
    synthetic.py                      random images of a seed, for runs without data
Names and files:
    files.py                          checked reads of files; pieces of files, and the scratch file of a cache
    limits.py                         limits of sizes before decoding, against hostile or damaged files
For `predict`:
    unlabelled.py                     images without labels, in the input shape of a model
"""
