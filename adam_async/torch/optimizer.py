"""A PyTorch optimizer that pushes gradients to a store and pulls values, for existing training loops.

    rule = Sgd(rate=0.1, momentum=0.9)
    with adam_async.sync.ParameterStore.open("local", parameter_arrays(model), rule=rule) as store:
        optimizer = RemoteOptimizer(model, store)
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

Theory of operation
-------------------
An `Exchange` is one push, and the following pull if one is due. `push_every` calls of `step()` sum their
gradients into one push, and a pull follows each `pull_every`-th push.

In blocking mode (`max_staleness=0`) `step()` waits for its exchange. The store reads gradients from `grad`
and writes values into the parameters, if these are contiguous memory of the CPU. After a failed exchange
gradients and parameters get new memory. So a late answer changes no parameter, and a late push has its own
step's gradients. Factors share the memory of the program's batches, so pushes copy them. With a larger
`max_staleness`, or on a GPU, gradients and values have `Staging` memory, from which servers on this host read
the gradients of CPU parameters. Up to `max_staleness` exchanges stay in flight during the next forward and
backward passes, and a later `step()` copies values that have arrived into the parameters. Only methods such
as `step()` change parameters, never a forward or backward pass.

The rule's state (momentum, means) is on the servers. With `pull_every` above 1 each `step()` that does not
wait for a pull takes a local step (`exchanges.py`), as this package's workers do (DistBelief, section 4.1;
decision 10).

Before each push and pull the optimizer looks for parameters that the program has changed (`changes.py`). A
single client gives such values to the store (`ParameterStore.assign`), after its pushes in flight and before
the next one; with several clients the change is an error.

Only one thread may use an optimizer. The store's thread sends, waits and receives.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from adam_async.errors import AdamError, ConfigError, StoreError, check_flags
from adam_async.model.rules import Sgd
from adam_async.run.events import StepsTaken
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.disk import Disk
from adam_async.store.arrays import Gradient
from adam_async.store.sync import ParameterStore
from adam_async.torch.buffers import Buffers, Policy
from adam_async.torch.changes import Changes
from adam_async.torch.devices import Staging, copy_streams, to_host
from adam_async.torch.exchanges import Exchange, Exchanges, LocalSteps, check_cadence
from adam_async.torch.factors import LinearFactors, LinearGradient
from adam_async.torch.gradients import Found, Overlap, Slot, Sums, collect, copied
from adam_async.torch.parameters import (
    ModuleParameters,
    ParameterGroups,
    Parameters,
    check_group,
    check_values,
    checked_counters,
)

logger = logging.getLogger(__name__)

REPORT_S = 1.0
"""Least time between two events with the steps of an optimizer, in seconds."""

STATE = "adam_async"
"""Key of this optimizer's own entry in its `state_dict`."""


class RemoteOptimizer(torch.optim.Optimizer):
    """Pushes a module's gradients to a store, and pulls the values of its parameters.

    The constructor pulls all parameters, so a client that joins a store begins with the store's values.

    Args:
        module: The module. The module's parameters may be on any device; names are those of
            `named_parameters()`.
        store: The store, synchronous, with an array for each parameter.
        params: Parameters to train, their names, or groups: mappings with `params`, each with an `lr`; None
            for all parameters of the module. Frozen parameters are not pushed.
        lr: Rate of groups without an `lr`; None for the rates of the store's rules.
        push_every: Number of `step()` calls whose gradients one push sums (n_push of Downpour). In bsp the
            push has the gradients' mean.
        pull_every: Number of pushes from one pull to the next (n_fetch of Downpour).
        max_staleness: Maximum number of unanswered pushes when `step()` returns. With 0 `step()` waits
            for the answer to its push, and for the pull if one is due. None: 0, or 1 with `pull_every` above
            1.
        overlap: Whether gradients are pushed during the backward pass; the program must not change gradients.
        buffers: ``local``, ``averaged``, ``push`` or ``pull``; see `adam_async.torch.buffers`.
        factors: Whether the gradient of an `nn.Linear` weight is pushed as two factors if these have fewer
            values (see `adam_async.torch.factors`). The `grad` of a weight pushed as factors is zero, so
            gradient clipping does not see it.
        allow_unused: Whether a push may lack parameters without a gradient; otherwise they are errors.

    Raises:
        ConfigError: An argument is invalid.
        StoreError: The store has no array for a parameter, an array of another shape or type, or a value that
            is not finite; the module then keeps its values.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ParameterStore,
        params: Parameters | None = None,
        *,
        lr: float | None = None,
        push_every: int = 1,
        pull_every: int = 1,
        max_staleness: int | None = None,
        overlap: bool = False,
        buffers: Policy = "local",
        factors: bool = False,
        allow_unused: bool = False,
    ) -> None:
        if not isinstance(store, ParameterStore):
            raise ConfigError(
                f"store is an adam_async.sync.ParameterStore, not {type(store).__name__}: a training loop "
                "blocks its thread, and an asynchronous store there could not answer"
            )
        check_flags(overlap=overlap, factors=factors, allow_unused=allow_unused)
        most = (0 if pull_every == 1 else 1) if max_staleness is None else max_staleness
        check_cadence(push_every, pull_every, most, store.consistency, overlap=overlap, factors=factors)
        known = ModuleParameters(module)
        known.check_store(store.arrays, store.name)
        self._module = module
        self._store = store
        self._named = known.named
        self._groups = ParameterGroups(module, known.named, store, lr)
        self._push_every, self._pull_every, self._most = push_every, pull_every, most
        self._allow_unused = allow_unused
        self._overlap = Overlap(self._push_bucket) if overlap else None
        self._factors = LinearFactors(module) if factors else None
        self._slots: list[Slot] = []
        self._by_name: dict[str, Slot] = {}
        self._steps = 0
        self._reported_at = 0.0
        self._pushes = 0
        self._sums = Sums()
        self._local = LocalSteps(store.rules, are_taken=pull_every > 1)
        self._changes = Changes(module, known.named, store)
        self._kept: Collection[str] = ()
        """Names of changed parameters, which keep their values when exchanges in flight end."""
        self._is_summed = store.consistency == "bsp"
        self._is_closed = False
        """Whether the hooks are removed, and this optimizer counts as no client."""
        self._is_begun = False
        """Whether a push of this optimizer was answered."""
        self._buffers = Buffers(module, store, buffers)
        self._exchanges = Exchanges(store, self._ended, self._failed)
        self._free: list[Staging] = []
        """Staging memory that no exchange uses."""
        self._streams = copy_streams(list(known.named.values()))
        super().__init__(self._groups.first(params), {})
        self.pull(discard=True)

    # --- parameter groups ----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, such as one of parameters that were frozen; see `torch.optim.Optimizer`.

        Raises:
            ConfigError: `params` is missing, a parameter is not the module's or joined it later, `lr` is not
                a rate or is missing for parameters with several rates, or the group has an unknown key or a
                constant of the store's rule.
            AdamError: An exchange in flight has failed; a second call adds the group.
        """
        group, names = self._groups.checked(param_group)
        with torch.no_grad():
            self._take_changes(self._by_name)
            # Staging memory has no room for the new parameters. An error adds no parameter.
            self._exchanges.settle(0)
        self._free.clear()
        super().add_param_group(group)
        for name, parameter in zip(names, group["params"], strict=True):
            slot = Slot(name, parameter, len(self.param_groups) - 1)
            self._slots.append(slot)
            if self._overlap is not None:
                self._overlap.watch(slot)
        self._groups.added(group)
        self._by_name = {slot.name: slot for slot in self._slots}

    # --- steps ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients and pull the values, if `push_every` and `pull_every` make these due.

        Args:
            closure: Computes the loss and its gradients again.

        Returns:
            The loss of `closure`; None without `closure`.

        Raises:
            StoreError: A gradient is missing, sparse, not finite or has another shape, and its push was not
                sent; or see `ParameterStore.push_pull`. Or an exchange of an earlier step failed.
            DeadlineExceeded: A server or the slowest client did not answer in time; see `ParameterStore`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            try:
                self._step()
            except BaseException as error:
                if self._overlap is not None:
                    # All exchanges in flight are buckets of this step.
                    self._overlap.abandon()
                    self._exchanges.abandon(wait=isinstance(error, AdamError))
                raise
        self._report_steps(loss)
        return loss

    def _report_steps(self, loss: float | None) -> None:
        """Give the steps so far to the callbacks of the store, once in `REPORT_S`."""
        now = fine_clock()
        if now < self._reported_at + REPORT_S:
            return
        self._reported_at = now
        number = nan if loss is None else float(torch.as_tensor(loss).detach())
        self._store.publish(
            StepsTaken(
                store=self._store.name,
                steps=self._steps,
                pushes=self._pushes,
                unanswered=sum(1 for _ in self._exchanges),
                loss=number if isfinite(number) else None,
            )
        )

    def _step(self) -> None:
        if self._is_closed:
            raise StoreError(
                "this optimizer was closed, and steps no more: call close() after the last step, or make "
                f"another RemoteOptimizer over store {self._store.name!r}"
            )
        self._exchanges.raise_failure()
        trained = self._trained()
        self._changes.check_parts(trained)
        rates = self._groups.rates(self.param_groups)
        if self._local.are_taken or self._sums.steps == self._push_every - 1:
            self._take_changes(trained)
        captured = {} if self._factors is None else self._factors.take(spend=True)
        gradients = collect(self._slots, captured, allow_unused=self._allow_unused)
        self._steps += 1
        due = gradients
        if self._push_every > 1:
            self._sums.add(gradients)
            if self._sums.steps < self._push_every:
                # Install no values yet: the store's values lack the gradients in the sums.
                self._take_local_step(gradients, rates)
                return
            due = self._sums.take(mean=self._is_summed)
        pulls = self._push(due, rates)
        if not (pulls and self._most == 0):
            self._take_local_step(gradients, rates)
        # In a store with clocks the first push waits for other clients; the second must not overtake it.
        self._exchanges.settle(self._most if self._is_begun else 0)
        self._is_begun = True
        if self._overlap is not None:
            self._overlap.is_ahead = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, even those captured as factors; see `torch.optim.Optimizer`."""
        super().zero_grad(set_to_none)
        if self._factors is not None:
            self._factors.clear()

    def _push(self, gradients: dict[str, Found], rates: Sequence[float]) -> bool:
        """Begin an exchange; return whether it pulls."""
        self._pushes += 1
        pulls = self._pushes % self._pull_every == 0
        is_on_cpu = all(slot.view is not None for slot in self._slots)
        staging = None if self._most == 0 and is_on_cpu else self._new_staging()
        dense = {name: each for name, each in gradients.items() if isinstance(each, Tensor)}
        if self._overlap is not None:
            dense = self._overlap.rest(dense)
        arrays: Mapping[str, Gradient]
        if staging is None:
            arrays = {name: gradient.numpy() for name, gradient in dense.items()}
        else:
            arrays = staging.gradients.download(dense)
        if self._factors is not None:
            # The program may change a layer's inputs while a push, failed or not, is in flight.
            arrays = {**arrays} | {
                name: copied(gradient.factors())
                for name, gradient in gradients.items()
                if isinstance(gradient, LinearGradient)
            }
        exchange = Exchange(gradients=arrays, rate=self._rate(arrays, rates), read=self._local.read)
        if pulls:
            self._add_pull(exchange, arrays, rates, staging)
        exchange.staging = staging
        if self._local.are_taken:
            self._local.count(gradients)
        self._local.begun(exchange)
        self._exchanges.begin(exchange)
        return pulls

    def _trained(self) -> list[str]:
        return [slot.name for slot in self._slots if slot.parameter.requires_grad]

    def _add_pull(
        self,
        exchange: Exchange,
        arrays: Mapping[str, Gradient],
        rates: Sequence[float],
        staging: Staging | None,
    ) -> None:
        """Add to an exchange the pull of all parameters that are not frozen, and the buffers."""
        # Equal names in equal order need one message each way; gradients may lack some names.
        trained = self._trained()
        names = list(arrays) if len(trained) == len(arrays) else trained
        if staging is None:
            exchange.out = {
                name: view
                for name in names
                if (slot := self._by_name[name]).is_direct and (view := slot.view) is not None
            }
        else:
            exchange.out = {name: staging.values.arrays[name] for name in names}
        if self._buffers.names:
            exchange.buffers = self._buffers.snapshot()
            last = None
            for earlier in self._exchanges:
                last = earlier.buffers or last
            changes = self._buffers.gradients(exchange.buffers, last)
            rate = exchange.rate if isinstance(exchange.rate, dict) else dict.fromkeys(arrays, rates[0])
            exchange.rate = {**rate, **dict.fromkeys(changes, self._buffers.rate)}
            exchange.gradients = {**arrays, **changes}
            names += self._buffers.names
        exchange.names = tuple(names)

    def _rate(self, names: Iterable[str], rates: Sequence[float]) -> float | dict[str, float]:
        if len(set(rates)) == 1:
            return rates[0]
        return {name: rates[self._by_name[name].group] for name in names}

    def _push_bucket(self, bucket: Sequence[Slot]) -> None:
        """Push the gradients of some parameters during the backward pass."""
        if not any(self._exchanges):  # the first bucket of this backward pass
            try:
                self._take_changes(self._trained())
            except BaseException:
                assert self._overlap is not None
                self._overlap.abandon()
                raise
        rates = self._groups.rates(self.param_groups)
        gradients = to_host([slot.parameter.grad.detach() for slot in bucket])
        arrays = {slot.name: array for slot, array in zip(bucket, gradients, strict=True)}
        rate = self._rate(arrays, rates)
        exchange = Exchange(gradients=arrays, rate=rate, read=self._local.read, ends_step=False)
        self._local.begun(exchange)
        self._exchanges.begin(exchange)

    def _take_local_step(self, gradients: Mapping[str, Found], rates: Sequence[float]) -> None:
        """Take a local step, if `pull_every` is above 1."""
        if self._local.are_taken:
            names = self._local.plain.intersection(gradients)
            self._changes.forget(names)
            self._local.take(self._by_name, gradients, rates)
            self._changes.note(names)

    # --- pulled values -------------------------------------------------------------------------

    def _ended(self, exchange: Exchange) -> None:
        """Copy the values of an ended exchange into the parameters that the store did not fill directly."""
        values = exchange.values
        if values is not None:
            self._local.note_read(values.read)
            pulled = {
                name: self._by_name[name].parameter
                for name in exchange.names or ()
                if name in self._by_name and name not in self._kept
            }
            self._changes.forget(pulled)
            exchange.install(self._by_name, pulled)
            if exchange.buffers:
                self._buffers.install(values, exchange.buffers, [later.buffers for later in self._exchanges])
            names = self._by_name.keys() & (exchange.names or ())
            self._local.pulled(self._by_name, names, pulled, self._exchanges)
            self._changes.note(pulled)
        if exchange.staging is not None:
            self._free.append(exchange.staging)

    def _failed(self, exchange: Exchange) -> None:
        """Give parameters and gradients new memory if the store may still use theirs for a failed exchange.

        The memory of the failed exchange is not used again.
        """
        if exchange.staging is not None:
            return
        self._sums.release()
        self._changes.note(exchange.leave_memory(self._by_name))

    def _new_staging(self) -> Staging:
        if not self._free:
            is_near = all(slot.view is not None for slot in self._slots)
            return Staging(
                {slot.name: slot.parameter.detach() for slot in self._slots},
                self._streams,
                self._store.buffers([*self._by_name]) if is_near else None,
            )
        staging = self._free.pop()
        staging.values.wait_free()
        return staging

    def pull(self, *, discard: bool = False) -> None:
        """Take the store's values of all parameters, including frozen ones, and of buffers whose policy is
        not ``local``.

        Raises the errors of exchanges in flight and of `ParameterStore.pull`, and StoreError for a value that
        is not finite. An error of the pull leaves the module as it was.

        Args:
            discard: Whether the store's values replace values that the program has changed. Without it the
                store first takes these, as `step` describes.
        """
        check_flags(discard=discard)
        with torch.no_grad():
            if not discard:
                self._changes.check_parts()
                self._take_changes(self._named)
            self._exchanges.settle(0)
            values = self._store.pull([*self._named, *self._buffers.names])
            check_values(values, self._store.name)
            self._changes.forget(self._named)
            for name, parameter in self._named.items():
                parameter.copy_(torch.from_numpy(np.array(values[name])))
            self._buffers.load(values)
            self._changes.note(self._named)
        self._local.restart(values.read)

    def flush(self) -> None:
        """Push waiting gradients and buffers, wait for all answers, and take the store's values.

        Call it at the end of the training, or before an evaluation. Errors are those of `step`.
        """
        with torch.no_grad():
            self._changes.check_parts()
            self._take_changes(self._named)
            if self._sums.steps:
                rates = self._groups.rates(self.param_groups)
                self._push(self._sums.take(mean=self._is_summed), rates)
            if self._buffers.names and self._pull_every > 1:
                self._push_buffers()
        self.pull()

    def _push_buffers(self) -> None:
        """Push the changes of buffers since the last pull; pushes without a pull lack them."""
        self._exchanges.settle(0)
        if changes := self._buffers.gradients(self._buffers.snapshot()):
            rate = dict.fromkeys(changes, self._buffers.rate)
            self._exchanges.begin(
                Exchange(gradients=changes, rate=rate, read=self._local.read, ends_step=False)
            )

    # --- values that the program changes -------------------------------------------------------

    def push_values(self, names: Iterable[nn.Parameter] | Iterable[str] | None = None) -> None:
        """Give the store the module's present values, exactly once and after all earlier pushes.

        The call is for changes of parameters by one client of several. The state of the store's rules
        (momentum, means) stays. The values replace the effects of pushes that they lack, both this client's
        and others'.

        Args:
            names: Parameters, or names of these; None for all parameters of the module, frozen ones too.

        Raises:
            ConfigError: A parameter is not of the module.
            StoreError, DeadlineExceeded: See `step`.
        """
        chosen = self._groups.names(
            self._named if names is None else [names] if isinstance(names, str | Tensor) else names
        )
        self._changes.check_parts()
        with torch.no_grad():
            self._assign(chosen)

    def _take_changes(self, names: Iterable[str]) -> None:
        """Give the store those parameters that the program has changed since the optimizer last wrote them.

        Raises:
            StoreError: Other clients train a changed parameter; or see `Changes`.
        """
        changed = self._changes.found(names)
        if not changed:
            return
        for exchange in self._exchanges:
            if not exchange.ends_step:
                self._changes.check_bucket(changed, exchange.gradients)
        behind = self._local.behind.intersection(changed)
        others = self._changes.others(changed)
        if behind or others:
            self._settle_but(changed)
            # The program may have copied values of the store into the module.
            equal = self._changes.equal(self._store.pull(changed))
            self._changes.note(equal)
            changed = [name for name in changed if name not in equal]
            if changed and others:
                raise self._changes.refusal(changed, others)
            self._changes.check_replaced(behind.intersection(changed), self._pushes)
        if changed:
            self._assign(changed)

    def _settle_but(self, names: Collection[str]) -> None:
        """Wait for all exchanges in flight, and keep the present values of some parameters."""
        self._kept = names
        try:
            self._exchanges.settle(0)
        finally:
            self._kept = ()

    def _assign(self, names: Collection[str]) -> None:
        """Replace the store's values of some parameters by the module's."""
        self._settle_but(names)
        # Copies, because an interrupted call does not recall its messages.
        values = to_host([self._named[name].detach() for name in names])
        self._store.assign(
            {name: np.array(array, order="C") for name, array in zip(names, values, strict=True)}
        )
        if self._local.are_taken:
            # The values have the local steps of the sums that are not pushed yet.
            self._sums.drop(self._local.plain.intersection(names))
        self._changes.note(names)
        self._local.behind.difference_update(names)
        self._local.count_all(names)

    # --- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter groups and the counters.

        The result has neither values nor the momentum and means of the store's rules. The servers keep values
        and state: a store with a folder (`dir`) is the checkpoint of both.
        """
        found: dict[str, Any] = super().state_dict()
        found[STATE] = {
            "push_every": self._push_every,
            "pull_every": self._pull_every,
            "steps": self._steps,
            "pushes": self._pushes,
            "store": self._local.store,
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the groups' rates and the counters of a `state_dict`, which has nothing else.

        The state of the store's rules stays as it is. If the `state_dict` is another store's and a rule has a
        state, a warning says so.

        Raises:
            ConfigError: The `state_dict` is of another optimizer, has another `push_every` or `pull_every`,
                or has a group that `add_param_group` refuses.
        """
        state = state_dict.get(STATE) if isinstance(state_dict, Mapping) else None
        own = checked_counters(state, push_every=self._push_every, pull_every=self._pull_every)
        for group in state_dict["param_groups"]:
            check_group(group)
        super().load_state_dict({name: part for name, part in state_dict.items() if name != STATE})
        self._steps, self._pushes = own["steps"], own["pushes"]
        rules = self._store.rules.values()
        has_state = any(not isinstance(rule, Sgd) or rule.momentum for rule in rules)
        if has_state and own.get("store") != self._local.store:
            logger.warning(
                "the state_dict has rates and counters only, and is of another store: momentum and means are "
                "those of store %r, which go on if it was opened from its folder (dir=, or --dir of its "
                "servers), and begin anew otherwise",
                self._store.name,
            )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a RemoteOptimizer cannot be copied or pickled, because it is one client of a store: make "
            "another over a copy of the module, pickle its state_dict(), or write the values by save(path)"
        )

    def save(self, path: str | Path) -> Path:
        """Write the module's `state_dict` with the store's values, in the safetensors format.

        `module.load_state_dict(safetensors.torch.load_file(path))` reads the file, with tied parameters and
        buffers. The buffers are those of this module. The call flushes first, and writes the file whole or
        not at all.

        Returns:
            The path.

        Raises:
            OSError: The file cannot be written.
            ConfigError: The module's `state_dict` has an entry that is no tensor.
        """
        self.flush()
        tensors = {}
        for name, tensor in self._module.state_dict().items():
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{name!r} in the module's state_dict() is a {type(tensor).__name__}, and safetensors "
                    "has tensors only: call optimizer.flush(), and torch.save(module.state_dict(), path)"
                )
            tensors[name] = tensor.detach().cpu().clone().contiguous()
        target, content = Path(path), save_tensors(tensors)

        async def write(_: object) -> None:
            async with Disk() as disk:
                await disk.write_atomic(target, [content])

        self._store.begin(write).wait()
        return target

    def close(self) -> None:
        """Flush, and remove the hooks from the module. The store stays open; a later `step` is an error."""
        try:
            self.flush()
        finally:
            self._end()
        self._is_closed = True  # after an error the program may use a cure and go on

    def _end(self) -> None:
        """Remove the hooks, and leave the optimizers of the store."""
        self._changes.close()
        if self._overlap is not None:
            self._overlap.close()
        if self._factors is not None:
            self._factors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()
            self._is_closed = True
