"""Objectives of the tests: sums over batches of a logistic regression and of a small network."""

import numpy as np

BATCHES = 12


def logistic(batches=BATCHES, seed=3, inputs=8, classes=3):
    """Return the arrays, the function and the batches of a regression, by default with 3 classes."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(240, inputs)) * np.linspace(0.3, 2, inputs)
    scores = images @ rng.normal(size=(inputs, classes)) + rng.gumbel(size=(240, classes))
    labels = np.argmax(scores, axis=1)
    arrays = {"w": np.zeros((inputs, classes)), "b": np.zeros(classes)}

    def function(values, batch):
        x, y = batch
        loss, errors = softmax(x @ values["w"] + values["b"], y, len(images))
        w = values["w"]
        return loss + 0.01 / batches * 0.5 * float((w * w).sum()), {
            "w": x.T @ errors + 0.01 / batches * w,
            "b": errors.sum(0),
        }

    return arrays, function, cut(images, labels, batches)


def network(batches=BATCHES, seed=5, hidden=16):
    """Return the arrays, the function and the batches of a network with one hidden layer of tanh."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(180, 6))
    labels = (np.sin(images[:, 0] * 2) + images[:, 1] * images[:, 2] > 0).astype(np.int64)
    arrays = {
        "hidden": rng.normal(size=(6, hidden)) * 0.5,
        "shift": np.zeros(hidden),
        "out": rng.normal(size=(hidden, 2)) * 0.5,
    }

    def function(values, batch):
        x, y = batch
        h = np.tanh(x @ values["hidden"] + values["shift"])
        loss, errors = softmax(h @ values["out"], y, len(images))
        back = (errors @ values["out"].T) * (1 - h * h)
        decay = 0.01 / batches
        loss += 0.5 * decay * sum(float((each * each).sum()) for each in values.values())
        gradient = {"hidden": x.T @ back, "shift": back.sum(0), "out": h.T @ errors}
        return loss, {name: each + decay * values[name] for name, each in gradient.items()}

    return arrays, function, cut(images, labels, batches)


def wide_logistic():
    """Return a regression with two shards of 16 KiB."""
    return logistic(inputs=80, classes=30)


def wide_network():
    """Return a network with three shards of 16 KiB."""
    return network(hidden=400)


def softmax(scores, labels, examples):
    """Return the loss, a mean over all examples, and the gradient of the scores."""
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(shares[rows, labels]).sum()) / examples
    shares[rows, labels] -= 1
    return loss, shares / examples


def cut(images, labels, batches):
    return list(zip(np.array_split(images, batches), np.array_split(labels, batches), strict=True))


def whole(arrays, function, batches):
    """Return the objective as a function of one vector, and the vector of the first values."""

    def of_vector(x):
        values, at = {}, 0
        for name, each in arrays.items():
            values[name], at = x[at : at + each.size].reshape(each.shape), at + each.size
        total, gradient = 0.0, np.zeros_like(x)
        for batch in batches:
            loss, found = function(values, batch)
            total += loss
            gradient += np.concatenate([found[name].ravel() for name in arrays])
        return total, gradient

    return of_vector, np.concatenate([each.ravel() for each in arrays.values()])
