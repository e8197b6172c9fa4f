"""The configuration with which a daemon runs, and its reload.

This module owns the present configuration. It must never take over a part of a configuration that cannot be used as a
whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from paramserver.config import DaemonConfig
from paramserver.errors import ConfigError
from paramserver.security.quotas import Quotas
from storage.base.errors import BudgetExceededError, ConflictError

log = logging.getLogger(__name__)

_BUDGETS = ("host_budget", "nvme_budget")
# The configuration keys whose new values a reload brings into effect without a restart of the daemon.
_QUOTAS = "quotas"
_LENDING = ("lend_budget", "lend_per_borrower")
_LIVE = (_QUOTAS, *_LENDING)


class Configuration:
    """The present configuration. While the daemon runs, only the quotas and the memory that it lends can change."""

    def __init__(
        self,
        config: DaemonConfig,
        read_again: Callable[[], DaemonConfig],
        quotas: Quotas,
        check: Callable[[DaemonConfig], None],
        lend: Callable[[DaemonConfig], None],
    ) -> None:
        """Keep the configuration with which the daemon has started, until `reload` changes it.

        Args:
            config: the configuration of the start.
            read_again: reads the configuration again from the same file, flags and variables; raises ConfigError.
            quotas: the object that gets the quotas of each configuration that is read.
            check: checks that a daemon with the given configuration could carry the jobs that are in the store now;
                raises BudgetExceededError.
            lend: changes how much memory the daemon lends to what the given configuration says.
        """
        self.present = config
        self._read_again = read_again
        self._quotas = quotas
        # A reload holds this lock from the reading of the configuration until it is in effect. So if two reloads run at
        # once, the configuration that was read last stays in effect.
        self._reloading = asyncio.Lock()
        self._check = check
        self._lend = lend

    async def reload(self) -> tuple[Sequence[str], Sequence[str]]:
        """Read the configuration again. Return the keys that are in effect from now on, and those that need a restart.

        Raises:
            ConflictError: the configuration cannot be used, or its budgets are too small for the jobs here; nothing has
                changed.
        """
        async with self._reloading:
            try:
                config = await asyncio.to_thread(self._read_again)
            except ConfigError as error:
                raise ConflictError(f"the configuration stays as it is: {error}") from error
            return self._take_over(config)

    def _take_over(self, config: DaemonConfig) -> tuple[Sequence[str], Sequence[str]]:
        changed = [key for key in DaemonConfig.model_fields if getattr(config, key) != getattr(self.present, key)]
        waiting = [key for key in changed if key not in _LIVE]
        try:
            # The new budgets are checked during the reload, although they come into effect at a restart. A daemon with
            # too small a budget would not start, or would refuse the ranks that attach again, so the operator gets the
            # error before the restart.
            if any(key in changed for key in _BUDGETS):
                self._check(config)
        except BudgetExceededError as error:
            raise ConflictError(f"the configuration stays as it is: {error}") from error
        self.present = self.present.model_copy(update={key: getattr(config, key) for key in changed if key in _LIVE})
        if _QUOTAS in changed:
            self._quotas.replace(config.quotas)
        if any(key in changed for key in _LENDING):
            self._lend(self.present)
        log.info("the configuration was read again: %s", ", ".join(changed) or "nothing has changed")
        return [key for key in changed if key in _LIVE], waiting
