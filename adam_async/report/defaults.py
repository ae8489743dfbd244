"""Pure: reasons, in words, for the values of the options that the user left open."""

from adam_async.run.config import Config
from adam_async.run.learning_rate import (
    DEFAULT_STEPS,
    EPOCHS_LEAST,
    EPOCHS_MOST,
    FALLING_MOST,
    PHOTO_RATE,
    PHOTO_RATE_STALE,
    RISE_EPOCHS,
    default_rate,
    norm_scale,
)


def explain_defaults(
    asked: Config, decided: Config, *, kernels: str, squared_norm: float = 0.0
) -> dict[str, str]:
    """Return the reason for the value of each option that the user left open.

    Args:
        asked: The options of the user.
        decided: The options in force, with the rate and the training mode.
        squared_norm: See `Dataset.squared_norm`; 0 if it is unknown.
    """
    found = {}
    if not asked.epochs:
        found["epochs"] = (
            f"as many as have {DEFAULT_STEPS:,} steps, at least {EPOCHS_LEAST} and at most {EPOCHS_MOST}"
        )
    if asked.images_per_group != decided.images_per_group:
        found["images_per_group"] = (
            f"fewer than {asked.images_per_group}: more steps of few photographs, with rule auto"
        )
    if asked.rule == "auto":
        found["rule"] = (
            "adam: the model for photographs learns more from few images with it"
            if decided.rule == "adam"
            else "sgd: the paper's rule"
        )
    if not asked.rate:
        found["rate"] = _why_rate(decided, squared_norm)
    if asked.schedule == "auto":
        found["schedule"] = _why_schedule(asked, decided)
    if not asked.momentum and decided.rule == "sgd":
        found["momentum"] = "none: groups in flight at once act like momentum that grows with their number"
    if not asked.copies:
        found["copies"] = _why_copies(decided)
    if not asked.threads:
        found["threads"] = "one for each core, shared out among the replicas"
    if not asked.in_flight:
        found["in_flight"] = (
            "one: stale gradients of few photographs cost accuracy"
            if decided.in_flight
            else "twice the threads of a replica, so that none waits for its next group"
        )
    if asked.weights == "auto":
        found["weights"] = _why_weights(decided)
    if asked.protocol == "auto":
        found["protocol"] = "fewer bytes, tensor by tensor"
    if asked.kernels == "auto":
        found["kernels"] = f"{kernels}; numba is taken where it is installed"
    return found


def _why_copies(decided: Config) -> str:
    copies = decided.copies_in_force
    if copies > 1:
        return f"{copies} on {decided.servers} servers: several controllers replace a lost primary"
    if decided.controllers == 1:
        return "one: a single controller is the first thing that a run would lose"
    if decided.servers == 1:
        return "one: there is one server"
    return "one: an option of this run excludes several"


def _why_rate(decided: Config, squared_norm: float) -> str:
    if decided.rule != "sgd":
        of = (
            "the model for photographs"
            if decided.rate in (PHOTO_RATE, PHOTO_RATE_STALE)
            else f"rule {decided.rule}"
        )
        return f"the default of {of}, for any number of images"
    images = decided.images_per_update
    why = f"0.06 for 16 images per update, scaled to {images} and by 1 - momentum"
    usual = default_rate(
        Config(
            momentum=decided.momentum,
            images_per_group=decided.images_per_group,
            push_every=decided.push_every,
            replicas=decided.replicas,
            consistency=decided.consistency,
            lag=decided.lag,
            schedule=decided.schedule,
            epochs=decided.epochs,
            warm_up=decided.warm_up,
        ),
        squared_norm=squared_norm,
    )
    if (scale := norm_scale(squared_norm)) < 1:
        why += f"; times {scale:.2g}, because the images have more or brighter pixels than those of MNIST"
    if decided.falls:
        why += f"; times {FALLING_MOST:g}, for it falls to nothing"
    if decided.rate < usual:
        why += f"; lowered from {usual:.4g} because gradients of so many groups in flight are stale"
    return why


def _why_schedule(asked: Config, decided: Config) -> str:
    if decided.schedule == "constant":
        return "constant: a run that ends at an accuracy does not know its last epoch"
    why = "cosine after a warm-up: steps that shrink to nothing leave no noise of single groups"
    long = not asked.warm_up and decided.warm_up > RISE_EPOCHS
    return f"{why}, and stale gradients upset the first ones" if long else why


def _why_weights(decided: Config) -> str:
    if decided.weights == "aliased":
        return "aliased: one process, every step pushed and pulled, and no option that needs a copy"
    if decided.processes:
        return "copy: each role has a process of its own"
    if decided.consistency != "asp":
        return f"copy: consistency {decided.consistency} decides when pushes of others become visible"
    return "copy: an option excludes training in place, on the servers' own memory"
