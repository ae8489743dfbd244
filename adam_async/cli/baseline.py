"""The baseline of a report: the rate of the bare kernels with the run's threads, model, rule and images."""

from collections.abc import Mapping
from typing import Any

from adam_async.data_server.dataset import Dataset
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network
from adam_async.model.rules import rule_of
from adam_async.model.spec import ModelSpec
from adam_async.report import baseline
from adam_async.report.baseline import measure_sgemm
from adam_async.run.config import Config
from adam_async.run.learning_rate import default_rate
from adam_async.run.model_selection import choose_model


class BaselineAround:
    """Measures the kernels before and after a run.

    Args:
        model_text: Contents of the model file, if `config` names one.
        init: Saved model that the run begins with, as for `choose_model`.
        layers: Kinds of layers that the model may use.

    Raises:
        ConfigError: The model is unknown or does not fit the data.
    """

    def __init__(
        self,
        config: Config,
        *,
        threads: int,
        dataset: Dataset,
        data: Mapping[str, Any],
        model_text: str | None,
        spec: ModelSpec | None = None,
        init: ModelSpec | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    ) -> None:
        self._config = config
        self._threads = threads
        self._dataset = dataset
        spec = spec or choose_model(config.model, data, text=model_text, init=init, layers=layers)
        self.network = Network(spec, dtype=config.dtype, kernels=config.kernels, layers=layers)
        self._rates: list[float] = []
        self._sgemm: list[float] = []

    async def measure(self) -> None:
        """Measure the kernels once, which takes about 4 s."""
        config = self._config
        rate = await baseline.measure(
            self.network,
            rule_of(config),
            rate=default_rate(config, squared_norm=self._dataset.squared_norm),
            images=self._dataset.train_images,
            labels=self._dataset.train_labels,
            group_images=config.images_per_group,
            threads=self._threads,
            shared=config.weights == "aliased",
        )
        self._rates.append(rate)
        self._sgemm.append(await measure_sgemm(self._threads))

    def result(self) -> baseline.Baseline:
        """Return the baseline from the measurements before and after the run."""
        before, after = self._rates
        sgemm = sum(self._sgemm) / len(self._sgemm)
        return baseline.Baseline(threads=self._threads, before=before, after=after, sgemm=sgemm)
