"""The table of all jobs in all their layouts, and the search for the parameters in damaged bytes.

This module owns the table, which only the registry and the kept steps change. It must never need a tier, because it
exists before the NVMe tier: that tier gets the damage log when it is made, and the damage log looks up in this table
which parameters the damaged bytes belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from storage.base.errors import NotFoundError
from storage.base.shard import Kind, SlabKey
from storage.state.versions import Job


class JobTable:
    """The jobs of one store. `by_name` has their newest committed layouts; `layouts` also returns the other ones.

    `kept` has the kept steps by job and name. Each is a `Job` without ranks, whose only step is the kept one.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Job] = {}
        self.kept: dict[str, dict[str, Job]] = {}

    def job(self, name: str) -> Job:
        """Return a job by its name. Raise NotFoundError if the store has no such job."""
        if name not in self.by_name:
            # The message does not list the jobs that exist, because any client may ask for a job, and other clients'
            # jobs do not concern it.
            raise NotFoundError(f"there is no job {name!r}")
        return self.by_name[name]

    def settled_layout(self, name: str) -> Job:
        """Return a job in the newest layout that has a settled step; if there is none, in its newest committed layout.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        job = self.job(name)
        layouts = [layout for layout in (*job.older, job) if layout.settled_step is not None]
        return layouts[-1] if layouts else job

    def layouts(self, name: str) -> list[Job]:
        """Return a job in each of its layouts, oldest first.

        These are the older layouts that are not freed yet, the newest committed layout, and the layout that is being
        filled to replace it, if there is one.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        job = self.job(name)
        filling = job.unfinished_successor
        return [*job.older, job, *([] if filling is None else [filling])]

    def kept_steps(self, name: str) -> dict[str, Job]:
        """Return the kept steps of a job by their names, each as a job without ranks that has one commit."""
        return self.kept.get(name, {})

    def add_kept(self, kept: Job) -> None:
        """Enter a kept step into `kept`, under the names of its job and of the step."""
        self.kept.setdefault(kept.spec.name, {})[kept.spec.kept] = kept

    def remove_kept(self, kept: Job) -> None:
        """Remove a kept step from `kept`. Its bytes stay; the caller frees them."""
        steps = self.kept[kept.spec.name]
        del steps[kept.spec.kept]
        if not steps:
            del self.kept[kept.spec.name]

    def all_kept(self) -> Iterator[Job]:
        """Return the kept steps of all jobs."""
        return (kept for steps in list(self.kept.values()) for kept in list(steps.values()))

    def __iter__(self) -> Iterator[Job]:
        """Return all jobs in all their layouts, without the kept steps."""
        return (layout for name in list(self.by_name) for layout in self.layouts(name))

    def has(self, job: Job) -> bool:
        """Return whether the layout `job` of the job is in the table: it was not deleted or freed."""
        name = job.spec.name
        return name in self.by_name and any(layout is job for layout in self.layouts(name))

    def holder(self, key: SlabKey) -> Job:
        """Return the layout of the job that has a slab. Raise NotFoundError if the layout is gone."""
        for job in self.layouts(key.job_name):
            if job.spec.identity == key.job:
                return job
        raise NotFoundError(f"job {key.job_name!r} is not laid out as it was any more; open it again")

    def fqns_at(self, label: str, offset: int, nbytes: int) -> tuple[str, ...]:
        """Return the FQNs of the parameters that have elements in these bytes of a version.

        Args:
            label: the name of the version, see `Slab.label`.
        """
        # The labels of a job's versions begin with the job's identity. The beginning is compared before the slabs are
        # searched, because a store may have a million slabs. A kept step has the identity and the labels of the job
        # that it was taken of.
        jobs: Iterable[Job] = (*self, *self.all_kept())
        for job in jobs:
            if not label.startswith(f"{job.spec.identity}/"):
                continue
            for group in job.groups.values():
                gradient = SlabKey(job.spec.identity, group.spec.name, Kind.GRAD)
                if gradient.is_of(label) and Kind.GRAD in group.spec.slab_of_kind:
                    return group.spec.fqns_at(Kind.GRAD, offset, nbytes)
                for slab in group.slabs:
                    if any(slab.label(version) == label for version in slab.versions):
                        return group.spec.fqns_at(slab.key.kind, offset, nbytes)
        return ()
