"""Pure: data augmentation: a recipe of random transforms makes another variant of each image in each epoch.

`recipe.py` checks the steps, and groups them into passes over the images. For each image the recipe draws
random numbers, which depend on the seed, the epoch, the step and the image. Each pass then transforms the
images with these numbers.

    recipe.py                start here: `Recipe`, its TOML file, the default steps
    steps.py                 kinds of steps with their options
    pipeline.py              the interface of a pass; the choice between NumPy's kernels and compiled ones
    geometry.py              steps that move pixels: shift, rotate, elastic, crop; joined into one resampling
    pixels.py                steps that change values: brightness, contrast, noise, cutout; user functions
    resample.py              bilinear resampling in integers, with equal results on every machine
    kernels.py, compiling.py compiled kernels (Numba), equal to NumPy's to the last bit; their child process
"""
